"""The tabular study, compared with sums over completions written as plain loops."""

import json

import pytest
import torch

from lit_klrb.cli.main import main
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import (
    EstimatorMemory,
    K1Loss,
    K3LossSequence,
    MonteCarlo,
    RaoBlackwell,
    RaoBlackwellControlVariate,
    RaoBlackwellTokenValues,
    RaoBlackwellTopK,
    TiltedRaoBlackwell,
)
from lit_klrb.functional import token_stats
from lit_klrb.functional.enumeration import (
    TabularLM,
    exact_kl,
    exact_kl_gradient,
    exact_objective,
    optimal_policy,
)
from lit_klrb.seeding import derive_seed
from replication.studies import PitfallsStudy

ESTIMATORS = [MonteCarlo(), RaoBlackwell(), K1Loss(allow_biased=True), K3LossSequence(allow_biased=True)]
CONFIG = "replication/configs/studies/pitfalls.yaml"
SMALL = {"max_length": 2, "policies": 2, "runs": 2, "steps": 4, "records": 2, "completions": 4}


@pytest.fixture(scope="module")
def study():
    return PitfallsStudy(estimators=ESTIMATORS, **SMALL)


@pytest.fixture(scope="module")
def artifact(study):
    return study.measure(seed=3)


def tables(study, part, index):
    models = study._models(3, part, 2)
    policy, reference = (TabularLM(table[index], 2) for table in (models.policies, models.references))
    return policy, reference, models.rewards[index]


def pair_gradient(estimator, policy, reference, rows):
    leaf = policy.logits.clone().requires_grad_()
    tokens, mask = (values[rows] for values in policy.sequences())
    logits = TabularLM(leaf, policy.max_length).token_logits(tokens)
    stats = token_stats(logits, reference.token_logits(tokens), tokens)
    loss = estimator.surrogate(stats, mask, group_size=2)
    return torch.autograd.grad(loss, leaf, materialize_grads=True)[0]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_expectation_and_variance_of_the_gradient_are_sums_over_pairs(study, artifact, estimator):
    found = artifact["gradients"][type(estimator).__name__]
    for index in range(2):
        policy, reference, _ = tables(study, "gradients", index)
        probabilities = policy.logprobs(*policy.sequences()).exp()
        mean, square = torch.zeros_like(policy.logits), 0.0
        for one, p in enumerate(probabilities):
            for other, q in enumerate(probabilities):
                gradient = pair_gradient(estimator, policy, reference, [one, other])
                mean += p * q * gradient
                square += p * q * gradient.square().sum()
        true = exact_kl_gradient(policy, reference)
        noise = (square - mean.square().sum()).sqrt() / true.norm()
        assert found["bias"][index] == pytest.approx(((mean - true).norm() / true.norm()).item(), abs=1e-5)
        assert found["noise"][index] == pytest.approx(noise.item(), rel=1e-5)


def test_what_the_pitfalls_paper_proves(artifact):
    gradients = artifact["gradients"]
    for name in ("MonteCarlo", "RaoBlackwell"):
        assert max(gradients[name]["bias"]) < 1e-12
    assert gradients["K1Loss"]["cosine"] == [None, None]
    assert gradients["K3LossSequence"]["reverse_cosine"] == pytest.approx([1, 1])
    assert max(gradients["K3LossSequence"]["cosine"]) < 0.999


def test_exact_descent_follows_the_exact_gradient(study, artifact):
    for run in range(2):
        policy, reference, _ = tables(study, "descent", run)
        forward, reverse = [], []
        for step in range(5):
            if step % 2 == 0:
                forward.append(exact_kl(policy, reference).item())
                reverse.append(exact_kl(reference, policy).item())
            policy = TabularLM(policy.logits - 0.5 * exact_kl_gradient(policy, reference), 2)
        assert artifact["kl"]["analytic"]["forward"][run] == pytest.approx(forward, rel=1e-5)
        assert artifact["kl"]["analytic"]["reverse"][run] == pytest.approx(reverse, rel=1e-5)


def test_exact_descent_on_the_objective_follows_its_exact_gradient(study, artifact):
    for run in range(2):
        policy, reference, reward = tables(study, "descent", run)
        best = optimal_policy(reference, reward, study.beta)
        for _ in range(4):
            leaf = policy.logits.clone().requires_grad_()
            objective = exact_objective(TabularLM(leaf, 2), reference, reward, study.beta)
            policy = TabularLM(policy.logits + 0.5 * torch.autograd.grad(objective, leaf)[0], 2)
        lost = exact_objective(best, reference, reward, study.beta)
        lost -= exact_objective(policy, reference, reward, study.beta)
        found = artifact["objective"]["analytic"]["to_optimum"][run][-1]
        assert found == pytest.approx(lost.item() / study.beta, rel=1e-5)


def test_the_distance_to_the_optimum_is_the_lost_objective(study, artifact):
    for run in range(2):
        policy, reference, reward = tables(study, "descent", run)
        best = optimal_policy(reference, reward, study.beta)
        lost = exact_objective(best, reference, reward, study.beta)
        lost -= exact_objective(policy, reference, reward, study.beta)
        found = [artifact["objective"][name]["to_optimum"][run][0] for name in ("analytic", "K1Loss")]
        assert found == pytest.approx([lost.item() / study.beta] * 2, rel=1e-5)


def test_estimators_descend_on_the_same_uniforms_and_the_unbiased_ones_towards_the_optimum(artifact):
    curves = {name: torch.tensor(found["to_optimum"]) for name, found in artifact["objective"].items()}
    for name in ("analytic", "MonteCarlo", "RaoBlackwell"):
        assert curves[name][:, -1].mean() < curves[name][:, 0].mean()
    assert artifact["kl"]["MonteCarlo"] != artifact["kl"]["RaoBlackwell"]


REMEMBERING = [RaoBlackwellTokenValues(), TiltedRaoBlackwell(), RaoBlackwellControlVariate()]


@pytest.fixture(scope="module")
def remembered():
    study = PitfallsStudy(estimators=[RaoBlackwell(), *REMEMBERING], **SMALL)
    return study, study.measure(seed=3)


@pytest.mark.parametrize("estimator", REMEMBERING, ids=lambda estimator: type(estimator).__name__)
def test_estimators_remember_the_completions_of_each_model(remembered, estimator):
    """As training does, for one model at a time."""
    study, artifact = remembered
    found = artifact["objective"][type(estimator).__name__]["to_optimum"]
    for run in range(2):
        policy, reference, rewards = tables(study, "descent", run)
        memory, (every, masks) = EstimatorMemory(estimator), policy.sequences()
        for step in range(1, 5):
            generator = torch.Generator().manual_seed(derive_seed(3, "pitfalls", "completions", step))
            uniforms = torch.rand(2, 4, dtype=torch.float64, generator=generator)[run]
            rows = torch.searchsorted(policy.logprobs(every, masks).exp().cumsum(0), uniforms)
            tokens, mask, leaf = every[rows], masks[rows], policy.logits.clone().requires_grad_()
            logits = TabularLM(leaf, 2).token_logits(tokens)
            ref_logits = reference.token_logits(tokens)
            stats = token_stats(logits, ref_logits, tokens, token_values=memory.token_values)
            settings = {"beta": study.beta, "group_size": 2}
            weights = memory.weights(stats.detach(), mask, rewards[rows], **settings, tokens=tokens)
            memory.observe(tokens, mask, rewards[rows], stats.detach(), group_size=2)
            loss = estimator.loss(stats, mask, weights, beta=study.beta)
            policy = TabularLM(leaf.detach() - 0.5 * torch.autograd.grad(loss, leaf)[0], 2)
        best = optimal_policy(reference, rewards, study.beta)
        lost = exact_objective(best, reference, rewards, study.beta)
        lost -= exact_objective(policy, reference, rewards, study.beta)
        assert found[run][-1] == pytest.approx(lost.item() / study.beta, rel=1e-5)
    assert found != artifact["objective"]["RaoBlackwell"]["to_optimum"]


def test_what_is_remembered_biases_no_gradient(remembered):
    gradients = remembered[1]["gradients"]
    for estimator in REMEMBERING:
        assert max(gradients[type(estimator).__name__]["bias"]) < 1e-12
    assert gradients["RaoBlackwellTokenValues"]["noise"] != gradients["RaoBlackwell"]["noise"]


def test_completions_are_sampled_from_the_policies():
    models = PitfallsStudy(**SMALL)._models(0, "descent", 2)
    chosen = models.sample(20_000, seed=0)
    expected = models.logprobs(models.policies).exp()
    for row, probabilities in zip(chosen, expected, strict=True):
        shares = row.bincount(minlength=len(probabilities)) / row.numel()
        error = (probabilities * (1 - probabilities) / row.numel()).sqrt()
        assert ((shares - probabilities).abs() < 4.5 * error).all()


def test_the_command_writes_a_run_and_repeats_itself(tmp_path, capsys):
    settings = [word for key, value in SMALL.items() for word in (f"--study.{key}", str(value))]
    artifacts = []
    for name in ("one", "other"):
        run = tmp_path / name
        argv = ["study", "--config", CONFIG, *settings]
        assert main([*argv, "--trainer.default_root_dir", str(run)]) == 0
        assert json.loads((run / "summary.json").read_text())["state"] == "done"
        artifacts.append((run / "studies" / "pitfalls.json").read_bytes())
    assert artifacts[0] == artifacts[1]
    assert main([*argv, "--seed_everything", "1", "--trainer.default_root_dir", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "studies" / "pitfalls.json").read_bytes() != artifacts[0]


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"completions": 3}, "completions"),
        ({"vocabulary": 1}, "vocabulary"),
        ({"max_length": 1_000_000}, "max_length"),
        ({"max_length": 9}, "max_length"),
        ({"steps": 5}, "steps"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"beta": float("nan")}, "beta"),
        ({"estimators": []}, "estimators"),
        ({"estimators": [MonteCarlo(), MonteCarlo(allow_biased=True)]}, "estimators"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, key):
    with pytest.raises(ConfigurationError) as refused:
        PitfallsStudy(**{**SMALL, **wrong})
    assert refused.value.key == key


def test_a_misspelt_option_is_named(capsys):
    assert main(["study", "--config", "configs/studies/estimation.yaml", "--study.prompt", "3"]) == 2
    assert "study.init_args.prompt (did you mean prompts?)" in capsys.readouterr().err
    assert main(["study", "--config", CONFIG, "--study.policy", "3"]) == 2
    assert capsys.readouterr().err == "error: unknown key study.init_args.policy (did you mean policies?)\n"


def test_top_k_estimators_see_k():
    estimators = [RaoBlackwell(), RaoBlackwellTopK(k=1)]
    gradients = PitfallsStudy(estimators=estimators, **SMALL).measure(seed=3)["gradients"]
    exact, sampled = gradients["RaoBlackwell"], gradients["RaoBlackwellTopK(k=1)"]
    assert max(sampled["bias"]) < 1e-12
    assert sampled["noise"] != pytest.approx(exact["noise"], rel=1e-3)


def test_a_study_that_does_not_end_leaves_the_earlier_run(tmp_path, monkeypatch):
    run = tmp_path / "run"
    settings = [word for key, value in SMALL.items() for word in (f"--study.{key}", str(value))]
    argv = ["study", "--config", CONFIG, *settings]
    argv += ["--trainer.default_root_dir", str(run)]
    assert main(argv) == 0
    before = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def interrupted(self, seed, estimator):
        raise KeyboardInterrupt

    monkeypatch.setattr(PitfallsStudy, "_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(argv)
    assert {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
