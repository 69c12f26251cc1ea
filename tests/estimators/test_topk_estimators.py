"""Top-k estimators: the certificate for every k and support, what the biased ones optimise, their values."""

import math

import pytest
import torch
from enumerated import expected_gradient
from test_certificate import BETA, CASES, CELLS, TOLERANCE, TRUTHS

from lit_klrb import estimators
from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TopK
from lit_klrb.functional.enumeration import TabularLM, exact_kl_gradient
from lit_klrb.functional.topk import kl_coarsened
from replication.topk_rivals import RIVALS, TopKTruncated

SUPPORTS = ("policy", "reference")
UNBIASED = {"RaoBlackwellTopK", "TopKWeightedTail", "TopKBaseline"}
KINDS = [estimators.RaoBlackwellTopK, estimators.CoarsenedTopK, *RIVALS]
HEADS = [
    (case, k, support)
    for case, entry in CASES.items()
    for k in range(1, entry.policy.logits.shape[-1] + 1)
    for support in SUPPORTS
]


def head_of(case, leaf, topk):
    """p and q at every position of every completion and whether a token is in the head, [..., V]."""
    tokens = case.sequences[0]
    policy = TabularLM(leaf, case.policy.max_length)
    p, q = (model.token_logits(tokens).softmax(-1) for model in (policy, case.reference))
    ranked = (p if topk.support == "policy" else q).detach()
    threshold = ranked.sort(-1, descending=True).values[..., topk.k - 1 : topk.k]
    return p, q, ranked >= threshold


def per_token(name, p, q, head):
    """K_t of the estimates that do not depend on the sampled token, from p and q."""
    log_ratio = p.log() - q.log()
    mass, ref_mass = ((values * head).sum(-1) for values in (p, q))
    of_head = (p * log_ratio * head).sum(-1)
    if name == "TopKTruncated":
        return of_head
    if name == "TopKRenormalised":
        inner, outer = p / mass[..., None], q / ref_mass[..., None]
        return (inner * (inner.log() - outer.log()) * head).sum(-1)
    if name == "CoarsenedTopK":
        rest = torch.where(head.all(-1), 1, 1 - mass), torch.where(head.all(-1), 1, 1 - ref_mass)
        return of_head + torch.where(head.all(-1), 0, rest[0] * (rest[0] / rest[1]).log())
    assert name == "TopKHeadOnly"
    return of_head - mass + ref_mass


def target(case, name, topk):
    """What each optimises, by autograd through the definitions."""
    unbiased = exact_kl_gradient(CASES[case].policy, CASES[case].reference)
    if name in UNBIASED:
        return unbiased
    leaf, truth = CASES[case].policy.logits.clone().requires_grad_(), TRUTHS[case]
    p, q, head = head_of(CASES[case], leaf, topk)
    if name == "TopKDetachedTail":
        total = truth.p @ ((p * head).sum(-1) * truth.mask).sum(-1)
        return unbiased + torch.autograd.grad(total, leaf)[0]
    probability = TabularLM(leaf, CASES[case].policy.max_length).logprobs(*CASES[case].sequences)
    total = probability.exp() @ (per_token(name, p, q, head) * truth.mask).sum(-1)
    return torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("case", "k", "support"), HEADS)
def test_the_expected_gradient_for_every_head(case, k, support, kind):
    """A fifth of the cells each, others for each head; `test_certificate` has all of them for one."""
    first = HEADS.index((case, k, support)) + KINDS.index(kind)
    expected = target(case, kind.__name__, TopK(k, support))
    whole = BETA * expected - TRUTHS[case].reward
    cells = CELLS if kind is estimators.RaoBlackwellTopK else CELLS[first % 11 :: 11]
    for (behind, off_policy), (group_size, baseline), variation in cells[first % 5 :: 5]:
        estimator = kind(k=k, support=support, baseline=baseline, off_policy=off_policy)
        for beta, wanted in ((None, expected), (BETA, whole)):
            gradient = expected_gradient(
                CASES[case], estimator, group_size, off_policy=behind, beta=beta, variation=variation
            )
            assert (gradient - wanted).abs().max() < TOLERANCE, (behind, off_policy, group_size, variation)


ROWS = slice(0, 14)  # seven prompts with two completions each


def rollout(topk, model="policy"):
    case = CASES["markov"]
    stats = case.stats(getattr(case, model).logits, topk)
    return stats.map(lambda field: field[ROWS]), case.sequences[1][ROWS], case.rewards[ROWS]


@pytest.mark.parametrize("off_policy", ["none", "clip", "token", "prefix", "sequence"])
@pytest.mark.parametrize("support", SUPPORTS)
def test_the_whole_vocabulary_is_rao_blackwell_in_every_mode(support, off_policy):
    results = []
    for estimator in (
        estimators.RaoBlackwell(off_policy=off_policy),
        estimators.RaoBlackwellTopK(k=3, support=support, off_policy=off_policy),
    ):
        old, mask, rewards = rollout(estimator.topk, "behaviour")
        case = CASES["markov"]
        leaf = case.policy.logits.clone().requires_grad_()
        new = case.stats(leaf, estimator.topk).map(lambda field: field[ROWS])
        weights = estimator.weights(old, mask, rewards, beta=BETA, group_size=2)
        loss = estimator.loss(new, mask, weights, beta=BETA, behaviour_logprobs=old.logprobs)
        gradient = torch.autograd.grad(loss, leaf)[0]
        results.append([weights.score, weights.kl, loss.detach(), gradient, estimator.value(new, mask)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_statistics_without_a_head_are_those_of_the_whole_vocabulary():
    stats, mask, rewards = rollout(None)
    whole, topk = (
        kind().weights(stats, mask, rewards, group_size=2).score
        for kind in (estimators.RaoBlackwell, estimators.RaoBlackwellTopK)
    )
    assert torch.equal(whole, topk)
    with pytest.raises(ConfigurationError, match=r"stats.head_kl is None"):
        TopKTruncated().weights(stats, mask, rewards, group_size=2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mean_values_are_unbiased_or_a_lower_bound_as_they_say(kind):
    truth = TRUTHS["markov"]
    exact = (truth.p @ truth.kl.sum(-1)).item()
    for support in SUPPORTS:
        estimator = kind(k=1, support=support)
        value = estimator.value(CASES["markov"].stats(truth.leaf.detach(), estimator.topk), truth.mask)
        error = (truth.p @ value).item() - exact
        assert (abs(error) < TOLERANCE) == (kind.__name__ in {*UNBIASED, "TopKDetachedTail"})
        if "lower bound" in kind.explanation.optimises:
            assert error < 0


@pytest.mark.parametrize("support", SUPPORTS)
def test_the_coarsened_kl_of_a_token_rises_with_the_head_to_the_exact_one(support):
    case, values = CASES["one token"], []
    for k in (1, 2, 3, 4):
        stats = case.stats(case.policy.logits, TopK(k, support))
        values.append(kl_coarsened(stats)[0, 0].item())
    exact = stats.kl[0, 0].item()
    assert values[0] < values[1] < exact - 1e-3
    # A rest of one token is that token
    assert values[2:] == pytest.approx([exact] * 2, abs=1e-12)
    without = kl_coarsened(case.stats(case.policy.logits))
    assert without[0, 0].item() == exact
    # All of the reference's mass is in the head, to rounding: the bound stays finite, and positive
    one = torch.ones(1)
    none_left = stats._replace(head_kl=one, head_mass=one / 2, ref_head_mass=one)
    assert 1 < kl_coarsened(none_left).item() < math.inf


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_biased_ones_train_only_if_told_to(kind):
    if kind.__name__ in UNBIASED:
        kind().check_trainable()
    else:
        with pytest.raises(ConfigurationError, match=f"{kind.__name__} is refused .* use RaoBlackwellTopK"):
            kind().check_trainable()
        kind(allow_biased=True).check_trainable()


def test_only_ours_is_computed_by_the_fused_loss():
    fusable = {kind.__name__ for kind in KINDS if kind().is_fusable}
    assert fusable == {"RaoBlackwellTopK"}
    assert not estimators.RaoBlackwellTopK(off_policy="prefix").is_fusable


def test_a_case_has_heads_that_differ_between_the_models():
    """Otherwise the support would not be tested."""
    case = CASES["markov"]
    heads = [head_of(case, case.policy.logits, TopK(1, support))[2] for support in SUPPORTS]
    assert (heads[0] != heads[1]).any()
