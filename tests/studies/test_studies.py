"""Artifacts of the studies, compared with simple implementations; no influence on training."""

import json
from types import SimpleNamespace

import pytest
import torch
from runs import StopAt, Stopped, weights_of, with_callback
from single_steps import attached

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import (
    EstimatorMemory,
    MonteCarlo,
    RaoBlackwell,
    TiltedRaoBlackwell,
)
from lit_klrb.models.loading import TOKEN_VALUES_KEY
from lit_klrb.seeding import derive_seed
from lit_klrb.studies import EstimationStudy, GradientNoiseStudy, gradient_noise
from lit_klrb.studies.gradient_noise import Task, policy_gradient
from replication.to_come import RaoBlackwellTokenValues

# The fitted control variate warns, as one of so few completions often dominates.
pytestmark = pytest.mark.filterwarnings("ignore:one of .* completions has")

NOISE = ["--trainer.callbacks+=GradientNoiseStudy", "--trainer.callbacks.batches=4"]
VALUES = [
    "--trainer.callbacks+=EstimationStudy",
    "--trainer.callbacks.prompts=3",
    "--trainer.callbacks.completions=4",
    "--trainer.callbacks.group_sizes=[1,2]",
]


@pytest.fixture(scope="module")
def studied(chain, tmp_path_factory):
    run = tmp_path_factory.mktemp("studied")
    extra = [*NOISE, "--trainer.callbacks.prompts_per_batch=2", *VALUES]
    assert chain.run("fit", "rloo", *extra, run=run) == 0
    return run


def artifact(run, name):
    return json.loads((run / "studies" / f"{name}.json").read_text())


def test_a_study_leaves_the_training_as_it_is(chain, studied):
    alone, beside = weights_of(chain.root / "rloo"), weights_of(studied)
    assert all(torch.equal(alone[key], beside[key]) for key in alone)


def test_a_resumed_run_has_the_same_artifacts(chain, studied, tmp_path, monkeypatch):
    extra = [*NOISE, "--trainer.callbacks.prompts_per_batch=2", *VALUES, "--checkpoint.every_n_train_steps=1"]
    with monkeypatch.context() as patched:
        with_callback(patched, StopAt(5), last=True)
        with pytest.raises(Stopped):
            chain.run("fit", "rloo", *extra, run=tmp_path)
    assert len(artifact(tmp_path, "gradient_noise")["snapshots"]) == 2
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    assert chain.run("fit", "rloo", *extra, "--ckpt_path", last, run=tmp_path) == 0
    for name in ("estimation", "gradient_noise"):
        assert artifact(tmp_path, name) == artifact(studied, name)


def test_the_moments_are_those_asked_for(studied):
    assert [snapshot["step"] for snapshot in artifact(studied, "gradient_noise")["snapshots"]] == [0, 3, 6]
    assert [snapshot["step"] for snapshot in artifact(studied, "estimation")["snapshots"]] == [0, 6]


def test_estimates_agree_where_they_must(studied):
    first = artifact(studied, "estimation")["snapshots"][0]
    values = {name: torch.tensor(value) for name, value in first["values"].items()}
    assert set(values) == {"k1", "k2", "k3", "cv", "cv_fitted", "rb"}
    assert all(value.shape == (3, 4) for value in values.values())
    # One draw that is not repeated: p / (1 - (1 - p)) times its log ratio.
    single = torch.tensor(first["horvitz_thompson"]["1"])
    assert torch.allclose(single, values["k1"], rtol=1e-3, atol=1e-5)
    assert torch.tensor(first["horvitz_thompson"]["2"]).shape == (3, 2)


def test_the_gram_matrix_is_that_of_gradients_taken_one_by_one(chain, tmp_path):
    module, batch = attached(chain, tmp_path, RaoBlackwell())
    study = GradientNoiseStudy(
        [MonteCarlo(), RaoBlackwell()], batches=4, prompts_per_batch=4, earlier_rollouts=0
    )
    study.prompts = lambda *_: [batch] * 4
    snapshot = study.measure(module.trainer, module)
    lower = torch.zeros(12, 12, dtype=torch.float64)
    for index, row in enumerate(snapshot["gram"]):
        lower[index, : index + 1] = torch.tensor(row, dtype=torch.float64)
    gradients = []
    for estimator, beta in ((MonteCarlo(), 0.0), (MonteCarlo(), 0.3), (RaoBlackwell(), 0.3)):
        module.memory, module.beta = EstimatorMemory(estimator), beta
        for index in range(4):
            gradients.append(gradient_of(module, batch, study, index))
    expected = torch.stack(gradients).double()
    products, norms = expected @ expected.T, expected.norm(dim=1)
    # Entries are rounded to a unit of at most 1e-5 of the norms
    errors = (lower - products.tril()).abs() / (norms[:, None] * norms)
    assert errors.max() < 2e-5


@pytest.mark.parametrize(("kind", "count"), [(TiltedRaoBlackwell, 1), (RaoBlackwellTokenValues, 3)])
def test_estimators_with_token_values_are_measured_with_those_of_earlier_rollouts(
    chain, tmp_path, kind, count
):
    """As training fits them, so their gradients are not those of `RaoBlackwell`."""
    module, batch = attached(chain, tmp_path, MonteCarlo())
    training, _ = attached(chain, tmp_path, kind())
    for policy in (module.policy, training.policy):  # away from the reference
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(2), slice(2, 4))]
    compared = [kind(), RaoBlackwell()]
    memories = gradient_noise.memories_after(Task.of(module), compared, [halves[0]] * count, seed=5)
    ((batch, last),) = gradient_noise.sampled(Task.of(module), [halves[1]], seed=6)
    found, *others = gradient_noise.batch_gradients(Task.of(module), batch, last, memories)[1:]
    assert (found - others[0]).norm() > 1e-5 * found.norm()

    seeds = [derive_seed(5, "gradient_noise", "earlier", index) for index in range(count)]
    seeds.append(derive_seed(6, "gradient_noise", 0))
    for half, seed in zip([halves[0]] * count + [halves[1]], seeds, strict=True):
        rollout = training.pair.sample(half, training.sampling, seed=seed)
        _, stats = training.pair.score(rollout, half, training.memory.token_values)
        rewards = training.training_rewards(rollout, training.pair.rewards(training.reward, rollout, half))
        weights = training.weigh(rollout, stats.detach(), rewards)
    expected = policy_gradient(training.policy, 0.3, training.kl_estimator, stats, rollout.mask, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

    with pytest.raises(ConfigurationError, match=f"earlier_rollouts: must be at least 1.*{kind.__name__} is"):
        gradient_noise.memories_after(Task.of(module), compared, [], seed=5)
    assert gradient_noise.memories_after(Task.of(training), compared, [], seed=5)[0] is training.memory


def test_token_values_begin_with_those_of_the_warm_start_as_in_training(chain, tmp_path):
    checkpoint = torch.load(chain.checkpoint("dpo"), weights_only=True)
    size = len(attached(chain, tmp_path, MonteCarlo())[0].policy.get_output_embeddings().weight)
    torch.save(checkpoint | {TOKEN_VALUES_KEY: torch.linspace(-1, 1, size)}, tmp_path / "dpo.ckpt")
    module, batch = attached(chain, tmp_path, TiltedRaoBlackwell(), policy_path=str(tmp_path / "dpo.ckpt"))
    halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(2), slice(2, 4))]
    memories = gradient_noise.memories_after(
        Task.of(module), [TiltedRaoBlackwell(), MonteCarlo()], halves, seed=5
    )
    for half, index in zip(halves, range(2), strict=True):
        seed = derive_seed(5, "gradient_noise", "earlier", index)
        rollout = module.pair.sample(half, module.sampling, seed=seed)
        _, stats = module.pair.score(rollout, half, module.memory.token_values)
        module.weigh(
            rollout,
            stats,
            module.training_rewards(rollout, module.pair.rewards(module.reward, rollout, half)),
        )
    found, expected = (memory.state_dict()["token_values"] for memory in (memories[0], module.memory))
    assert expected["prior"].any()
    torch.testing.assert_close(found, expected)


def test_small_batches_are_sampled_together(chain, tmp_path):
    module, batch = attached(chain, tmp_path, MonteCarlo())
    narrow, wide = ({name: value[rows] for name, value in batch.items()} for rows in (slice(2), slice(2, 4)))
    wide = {name: torch.nn.functional.pad(value, (3, 0)) for name, value in wide.items()}
    task = Task.of(module)._replace(prompts=5)
    found = [*gradient_noise.sampled(task, [narrow, wide, narrow], seed=6)]
    assert [given for given, _ in found] == [narrow, wide, narrow]
    rollouts = [rollout for _, rollout in found]
    together = module.pair.sample(batch, module.sampling, seed=derive_seed(6, "gradient_noise", 0))
    assert torch.equal(torch.cat([rollout.completions for rollout in rollouts[:2]]), together.completions)
    width = narrow["tokens"].shape[1]
    prompts = rollouts[1].tokens[:: module.sampling.completions_per_prompt, 3 : width + 3]
    assert torch.equal(prompts, batch["tokens"][2:4])
    alone = module.pair.sample(narrow, module.sampling, seed=derive_seed(6, "gradient_noise", 2))
    assert torch.equal(rollouts[2].completions, alone.completions)


def test_a_study_samples_as_many_prompts_at_a_time_as_training(chain, tmp_path):
    module, batch = attached(chain, tmp_path, MonteCarlo())
    half = {name: value[:2] for name, value in batch.items()}
    study = GradientNoiseStudy(
        [MonteCarlo(), RaoBlackwell()], batches=4, prompts_per_batch=2, earlier_rollouts=0
    )
    study.prompts = lambda *_: [half] * 4
    sizes, sample = [], module.pair.sample
    module.pair.sample = lambda prompts, *args, **options: (
        sizes.append(len(prompts["tokens"])) or sample(prompts, *args, **options)
    )
    module.trainer.datamodule = SimpleNamespace(batch_size=4)
    study.measure(module.trainer, module)
    assert sizes == [4, 4]


def gradient_of(module, batch, study, index):
    """Computed by a training step on the study's completions."""
    draws = derive_seed(module.seed, study.name, index)
    sample = module.pair.sample
    module.pair.sample = lambda *args, **options: sample(*args, **{**options, "seed": draws})
    module.zero_grad()
    module.training_step(batch, 0).backward()
    module.pair.sample = sample
    return torch.cat([p.grad.flatten() for p in module.policy.parameters()])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([*NOISE, "--trainer.callbacks.at=[2]"], "at takes fractions of the run"),
        ([*NOISE[:1], "--trainer.callbacks.batches=2"], "batches: must be at least 4"),
        ([*NOISE[:1], "--trainer.callbacks.prompts_per_batch=0"], "prompts_per_batch: must be at least 1"),
        ([*NOISE[:1], "--trainer.callbacks.earlier_rollouts=-1"], "earlier_rollouts: must be at least 0"),
        ([*NOISE[:1], "--trainer.callbacks.batches=40"], "needs 48 × 8 training prompts, got "),
        ([VALUES[0], "--trainer.callbacks.prompts=1"], "prompts: must be at least 2"),
        ([VALUES[0], "--trainer.callbacks.completions=7"], "completions=7 must be a multiple"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_studied_is_refused_in_one_line(chain, tmp_path, capsys, extra, message):
    assert chain.run("fit", "rloo", *extra, run=tmp_path / "run") == 2
    assert message in capsys.readouterr().err


def test_the_defaults_are_what_the_statistics_ask_for():
    assert GradientNoiseStudy().batches == 64
    assert EstimationStudy().design["group_sizes"] == [1, 5, 10]
