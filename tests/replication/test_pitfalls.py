"""The tabular study, compared with sums over completions written as plain loops."""

import json

import pytest
import torch

from lit_klrb.estimators import (
    K1Loss,
    K3LossSequence,
    MonteCarlo,
    RaoBlackwell,
    RaoBlackwellControlVariate,
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
from replication.__main__ import main
from replication.studies import PitfallsStudy
from replication.to_come import RaoBlackwellTokenValues

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


def test_what_is_remembered_biases_no_gradient(remembered):
    gradients = remembered[1]["gradients"]
    for estimator in REMEMBERING:
        assert max(gradients[type(estimator).__name__]["bias"]) < 1e-12
    assert gradients["RaoBlackwellTokenValues"]["noise"] != gradients["RaoBlackwell"]["noise"]


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
