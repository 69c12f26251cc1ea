"""The study of gradients at checkpoints: its layers are sums, its matrix is that of the losses."""

import json

import pytest
import torch
from torch import nn

from analysis.results.artifacts import read_studies
from analysis.stats.gradient_noise import NoiseSnapshot
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate
from replication.studies import CheckpointPair
from replication.studies.pair_gradients import PairGradientNoiseStudy, by_layer

# The fitted control variate warns where one of few completions dominates.
pytestmark = pytest.mark.filterwarnings("ignore:one of .* completions has")
SMALL = {"batches": 4, "prompts_per_batch": 2, "beta": 0.3}


@pytest.fixture(scope="module")
def pair(chain):
    paths = {"policy_path": chain.checkpoint("dpo"), "reference_path": chain.checkpoint("sft")}
    return CheckpointPair(**paths, max_new_tokens=8)


ESTIMATORS = [
    *(MonteCarlo(), RaoBlackwell(), RaoBlackwellControlVariate()),
    RaoBlackwellControlVariate(directions=("token_values", "kl")),
]


@pytest.fixture(scope="module")
def artifact(pair):
    study = PairGradientNoiseStudy(pairs=[pair], estimators=ESTIMATORS, earlier_rollouts=2, **SMALL)
    return json.loads(json.dumps(study.measure(seed=0)))


def whole(snapshot, side):
    gram = torch.zeros(side, side, dtype=torch.float64)
    for index, row in enumerate(snapshot["gram"]):
        gram[index, : index + 1] = gram[: index + 1, index] = torch.tensor(row, dtype=torch.float64)
    return gram


def test_layers_are_sums_over_their_parameters():
    model = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)]), "wte": nn.Embedding(4, 2)})
    blocks = {"block 0": slice(0, 9), "block 1": slice(9, 17), "embeddings and head": slice(17, 25)}
    gradients = torch.randn(3, 5, 25, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = by_layer(model, gradients)
    assert found.keys() == blocks.keys()
    for layer, place in blocks.items():
        for term, values in (("total", gradients[1:]), ("kl", gradients[1:] - gradients[:1])):
            for estimator, pair in ((0, 0), (1, 1)):
                first, second = values[estimator, 2 * pair, place], values[estimator, 2 * pair + 1, place]
                halves = sum((a - b) ** 2 for a, b in zip(first.tolist(), second.tolist(), strict=True)) / 2
                assert found[layer][term][estimator][pair] == pytest.approx(halves, rel=1e-5)
            assert len(found[layer][term]) == len(found[layer][term][0]) == 2


def test_gradients_are_those_of_the_estimators_loss(pair, artifact):
    models, reward = pair.load(), pair.load_reward()
    batch = pair.batches(models, 6, 2)[2]  # after two batches for the earlier rollouts
    from lit_klrb.seeding import derive_seed

    rollout = models.sample(batch, pair.sampling(2), seed=derive_seed(0, "gradient_noise", 0))
    stats = models.score(rollout, batch)[1]
    loss = RaoBlackwell().objective(
        stats, rollout.mask, models.rewards(reward, rollout, batch), beta=0.3, group_size=2
    )
    gradients = torch.autograd.grad(loss, list(models.policy.parameters()))
    norm = sum(part.double().square().sum().item() for part in gradients)
    gram = whole(artifact["snapshots"][0], 20)
    assert gram[8, 8].item() == pytest.approx(norm, rel=1e-4)


def test_earlier_rollouts_change_the_fitted_combination_alone(pair, artifact):
    none = PairGradientNoiseStudy(pairs=[pair], estimators=ESTIMATORS, **SMALL).measure(seed=0)
    # Without earlier rollouts, the batches are the first prompts
    assert none["snapshots"][0]["gram"] != artifact["snapshots"][0]["gram"]
    fitted = [one["gram"][12][12] for one in (none["snapshots"][0], artifact["snapshots"][0])]
    sampled = [one["gram"][4][4] for one in (none["snapshots"][0], artifact["snapshots"][0])]
    assert fitted[0] == pytest.approx(sampled[0], rel=1e-5)  # two groups are too few to fit: MonteCarlo
    assert fitted[1] != pytest.approx(sampled[1], rel=1e-3)


def test_two_arms_of_one_class_have_different_names_and_gradients(artifact):
    (study,) = read_studies({"gradient_noise": artifact})
    names = ["RaoBlackwellControlVariate", "RaoBlackwellControlVariate(directions=[token_values, kl])"]
    assert study.estimators == ["MonteCarlo", "RaoBlackwell", *names]
    (snapshot,) = study.snapshots
    noise = NoiseSnapshot(snapshot.step, snapshot.gram, study.estimators)
    assert noise.noise("total", names[0]) != pytest.approx(noise.noise("total", names[1]), rel=1e-3)
