"""The study of gradients at checkpoints: its matrix and layers agree, and it is the callback's."""

import json

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate
from lit_klrb.studies import CheckpointPair, PairGradientNoiseStudy

# The fitted control variate warns where one of few completions dominates.
pytestmark = pytest.mark.filterwarnings("ignore:one of .* completions has")
SMALL = {"batches": 4, "prompts_per_batch": 2, "beta": 0.3}


@pytest.fixture(scope="module")
def pair(chain):
    paths = {"policy_path": chain.checkpoint("dpo"), "reference_path": chain.checkpoint("sft")}
    return CheckpointPair(**paths, max_new_tokens=8)


@pytest.fixture(scope="module")
def artifact(pair):
    estimators = [MonteCarlo(), RaoBlackwell(), RaoBlackwellControlVariate()]
    study = PairGradientNoiseStudy(pairs=[pair], estimators=estimators, earlier_rollouts=2, **SMALL)
    return json.loads(json.dumps(study.measure(seed=0)))


def whole(snapshot, side):
    gram = torch.zeros(side, side, dtype=torch.float64)
    for index, row in enumerate(snapshot["gram"]):
        gram[index, : index + 1] = gram[: index + 1, index] = torch.tensor(row, dtype=torch.float64)
    return gram


def test_layers_add_up_to_the_gram_matrix(artifact):
    (snapshot,) = artifact["snapshots"]
    gram = whole(snapshot, 16)
    rounding = 4e-6 * gram.abs().max().item()  # of a matrix with seven digits
    assert {"block 0", "embeddings and head"} == set(snapshot["layers"])
    for term, reward in (("total", 0.0), ("kl", 1.0)):
        found = sum(torch.tensor(layer[term], dtype=torch.float64) for layer in snapshot["layers"].values())
        for estimator in range(3):
            for place in (0, 2):
                row = torch.zeros(16, dtype=torch.float64)
                first = 4 * (1 + estimator) + place
                row[[first, first + 1]] = torch.tensor([1.0, -1.0], dtype=torch.float64)
                row[[place, place + 1]] = -reward * torch.tensor([1.0, -1.0], dtype=torch.float64)
                expected = (row @ gram @ row).item() / 2
                assert found[estimator, place // 2].item() == pytest.approx(expected, rel=1e-3, abs=rounding)


def test_gradients_are_those_of_the_estimators_loss(pair, artifact):
    module = pair.load(completions=2)
    module.beta = SMALL["beta"]
    batch = pair.batches(module, 6, 2)[2]  # after two batches for the earlier rollouts
    from lit_klrb.seeding import derive_seed

    rollout = module.generate(module.policy, batch, module.sampling, seed=derive_seed(0, "gradient_noise", 0))
    stats = module.score(rollout)[1]
    loss = RaoBlackwell().objective(stats, rollout.mask, module.rewards(rollout), beta=0.3, group_size=2)
    gradients = torch.autograd.grad(loss, list(module.policy.parameters()))
    norm = sum(part.double().square().sum().item() for part in gradients)
    gram = whole(artifact["snapshots"][0], 16)
    assert gram[8, 8].item() == pytest.approx(norm, rel=1e-4)


def test_earlier_rollouts_change_the_fitted_combination_alone(pair, artifact):
    estimators = [MonteCarlo(), RaoBlackwell(), RaoBlackwellControlVariate()]
    none = PairGradientNoiseStudy(pairs=[pair], estimators=estimators, **SMALL).measure(seed=0)
    # Without earlier rollouts, the batches are the first prompts
    assert none["snapshots"][0]["gram"] != artifact["snapshots"][0]["gram"]
    fitted = [one["gram"][12][12] for one in (none["snapshots"][0], artifact["snapshots"][0])]
    sampled = [one["gram"][4][4] for one in (none["snapshots"][0], artifact["snapshots"][0])]
    assert fitted[0] == pytest.approx(sampled[0], rel=1e-5)  # two groups are too few to fit: MonteCarlo
    assert fitted[1] != pytest.approx(sampled[1], rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"batches": 3}, "batches"),
        ({"beta": 0.0}, "beta"),
        ({"estimators": [MonteCarlo()] * 2}, "estimators"),
    ],
)
def test_settings_out_of_range_are_refused(pair, wrong, key):
    with pytest.raises(ConfigurationError) as refused:
        PairGradientNoiseStudy(**{"pairs": [pair], **SMALL, **wrong})
    assert refused.value.key == key
