"""Studies of enumerated models, compared with plain loops over their completions."""

import itertools

import pytest
import torch

from lit_klrb.estimators import EstimatorMemory, MonteCarlo, RaoBlackwell, RaoBlackwellLoss
from lit_klrb.functional.enumeration import TabularLM, exact_kl_gradient
from replication.studies import DistillationStudy, IdentitiesStudy, OffPolicyStudy
from replication.studies.baselines import shrinkage_variances, token_baseline_variances
from replication.studies.stratified import completion_scores, stratified_moments
from replication.studies.tabular import TabularPairs

SMALL = {"vocabulary": 3, "max_length": 2, "policies": 2, "inner_steps": 2}


@pytest.fixture(scope="module")
def off_policy():
    return OffPolicyStudy(**SMALL).measure(seed=1)


def weighted(study, name, correction, term, step):
    return torch.tensor(study["moments"][name][correction][term]["bias"])[:, step]


@pytest.mark.parametrize("term", ["kl", "objective"])
@pytest.mark.parametrize("name", ["MonteCarlo", "RaoBlackwell"])
def test_prefix_and_sequence_weights_are_unbiased_and_the_others_are_not(off_policy, name, term):
    for correction in ("prefix", "sequence"):
        for step in range(3):
            assert weighted(off_policy, name, correction, term, step).max() < 1e-12
    for correction in ("none", "token", "clip"):
        assert weighted(off_policy, name, correction, term, 0).max() < 1e-12
        assert weighted(off_policy, name, correction, term, 2).min() > 1e-3


def test_off_policy_moments_are_sums_over_pairs_of_completions():
    pairs = TabularPairs.random(3, 1, vocabulary=3, max_length=2)
    first = pairs.policies
    pairs.policies = first + 0.2 * torch.randn(first.shape, dtype=torch.float64)
    estimator = MonteCarlo(off_policy="token")
    found = pairs.moments(estimator, beta=0.5, behaviour=first)
    probabilities = pairs.logprobs(first)[0].exp()
    mean, square = torch.zeros(first.numel(), dtype=torch.float64), 0.0
    for one, other in itertools.product(range(len(probabilities)), repeat=2):
        leaf = pairs.policies.clone().requires_grad_()
        case = TabularPairs(leaf, pairs.references, 2, pairs.rewards)
        chosen = torch.tensor([[one, other]])
        loss = case.loss(EstimatorMemory(estimator), chosen, group_size=2, beta=0.5, behaviour=first)
        gradient = torch.autograd.grad(loss, leaf)[0].flatten()
        mean += probabilities[one] * probabilities[other] * gradient
        square += probabilities[one] * probabilities[other] * gradient.square().sum()
    assert torch.allclose(found.mean[0], mean)
    assert found.variance[0].item() == pytest.approx((square - mean.square().sum()).item())


def test_distillation_follows_the_exact_gradient_and_a_limited_student_stays_away():
    study = DistillationStudy(
        vocabulary=3,
        max_length=3,
        distances=[1.0],
        batches=[8],
        learning_rates=[0.1],
        selection=2,
        evaluation=2,
        steps=60,
        arms={"own": RaoBlackwellLoss(), "future": RaoBlackwell()},
    )
    artifact = study.measure(seed=0)
    assert [cell["capacity"] for cell in artifact["cells"]] == ["full", "limited"]
    start, analytic = torch.tensor(artifact["start"]), torch.tensor(artifact["finals"]["analytic"])[:, 0]
    assert (analytic[0] < 0.02 * start[0]).all()
    assert (analytic[1] > 0.1).all()  # no row per prefix: the teacher cannot be matched
    finals = {arm: torch.tensor(values)[:, 0] for arm, values in artifact["finals"].items()}
    assert set(finals) == {"analytic", "own", "future", "discount 0 to 1, exact"}
    assert all((kl.mean(1) < start.mean(1)).all() for kl in finals.values())
    assert not torch.equal(finals["own"], finals["future"])


def test_a_shared_row_is_that_of_the_last_token():
    study = DistillationStudy(vocabulary=3, max_length=3, selection=2, evaluation=2)
    pairs = study._pairs(0, study.cells[-1])
    tokens, _ = TabularLM(pairs.references[0], 3).sequences()
    rows = pairs.prefixes % pairs.policies.shape[1]
    for row, completion in zip(rows.tolist(), tokens.tolist(), strict=True):
        for place in (1, 2):
            if 0 not in completion[:place]:
                assert row[place] == completion[place - 1] % 2


PAIRS = TabularPairs.random(5, 3, vocabulary=3, max_length=2)


def test_scores_are_gradients_of_log_probabilities():
    scores = completion_scores(PAIRS)
    probabilities, k1 = PAIRS.logprobs(PAIRS.policies).exp(), PAIRS.logprobs(PAIRS.policies)
    k1 = k1 - PAIRS.logprobs(PAIRS.references)
    for index in range(3):
        models = [TabularLM(table[index], 2) for table in (PAIRS.policies, PAIRS.references)]
        found = (probabilities[index] * k1[index]) @ scores[index]
        assert torch.allclose(found, exact_kl_gradient(*models).flatten())


def test_stratified_expectations_agree_with_a_fine_grid_of_shifts():
    found = stratified_moments(PAIRS, [3])["3"]
    assert max(found["bias_without_baseline"]) < 1e-12
    scores, exact = completion_scores(PAIRS), PAIRS.exact_gradient()
    grid = (torch.arange(30_000, dtype=torch.float64) + 0.5) / 30_000 / 3
    for index in range(3):
        p, q = (PAIRS.logprobs(table)[index] for table in (PAIRS.policies, PAIRS.references))
        places = grid[:, None] + torch.arange(3) / 3
        chosen = torch.searchsorted(p.exp().cumsum(0), places).clamp(max=len(p) - 1)
        values = (p - q)[chosen]
        left_out = values - (values.sum(1, keepdim=True) - values) / 2
        mean = (left_out[..., None] * scores[index][chosen]).mean((0, 1))
        bias = (mean - exact[index]).norm() / exact[index].norm()
        assert found["bias"][index] == pytest.approx(bias.item(), abs=2e-3)
        independent = p.exp() @ ((p - q) - p.exp() @ (p - q)).square() / 3
        ratio = values.mean(1).var() / independent
        assert found["variance"][index] == pytest.approx(ratio.item(), abs=2e-3)


def test_a_baseline_per_position_with_its_own_norm_is_optimal_without_shared_parameters():
    found = token_baseline_variances(PAIRS)["row_per_prefix"]
    assert max(found["own"]) <= 1
    assert all(own <= other + 1e-9 for own, other in zip(found["own"], found["cumulative"], strict=True))


def test_shrinkage_helps_where_prompts_are_alike():
    found = shrinkage_variances(0, 2000)
    assert found["spread 0, 2 completions"]["ratio"] < 0.3
    assert found["spread 3, 8 completions"]["ratio"] > 1


def test_identities():
    found = IdentitiesStudy(models=4, batches=100).measure(seed=0)
    assert found["worked_examples"] == pytest.approx({"coins": 0.0823, "log_ratio": 1.609}, abs=5e-4)
    assert found["counterexample"]["k1"] < 1e-12 < 0.1 < found["counterexample"]["rb"]
    assert max(found["names"].values()) < 1e-12
    assert max(found["token_level"]["to_token_level"] + found["token_level"]["one_token"]) < 1e-12
    assert min(found["token_level"]["to_sequence"]) > 1e-3
    for at in found["topk"].values():
        for name, by_head in at["estimates"].items():
            unbiased = name in ("exact head, sampled tail", "weighted tail", "baseline")
            assert (by_head["32"]["gradient_bias"] < 1e-9) == unbiased, name
        ours = at["estimates"]["exact head, sampled tail"]
        assert min(row["least_value"] for row in ours.values()) >= 0
