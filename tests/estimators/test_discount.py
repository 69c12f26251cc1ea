"""The discount of the credit for later KLs: its two ends, the weights in plain loops, and the exact bias."""

import pytest
import torch
from enumerated import Case, Variation, expected_gradient

from lit_klrb import estimators
from lit_klrb.cli.explain import estimator_classes
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwell, RaoBlackwellLoss, Term
from lit_klrb.estimators.composed import Discounted
from lit_klrb.functional.credit import reward_to_go
from lit_klrb.functional.enumeration import exact_kl_gradient

CASE = Case.random(contexts=3, vocab_size=3, max_length=4, seed=8)
ROWS = torch.tensor([0, 5, 20, 11, 3, 29])
BETA, GROUP_SIZE = 0.4, 2
KINDS = sorted(name for name, kind in estimator_classes().items() if issubclass(kind, Discounted))
MODES = ["none", "clip", "token", "prefix", "sequence"]


def parts_of(estimator, off_policy_rollout):
    """Score weights, KL weights, loss and its gradient in the policy's logits."""
    mask, rewards = CASE.sequences[1][ROWS], CASE.rewards[ROWS]
    model = CASE.behaviour if off_policy_rollout else CASE.policy
    old = CASE.stats(model.logits, estimator.topk).map(lambda field: field[ROWS])
    leaf = CASE.policy.logits.clone().requires_grad_()
    new = CASE.stats(leaf, estimator.topk).map(lambda field: field[ROWS])
    weights = estimator.weights(old, mask, rewards, beta=BETA, group_size=GROUP_SIZE)
    loss = estimator.loss(new, mask, weights, beta=BETA, behaviour_logprobs=old.logprobs)
    return weights.score, weights.kl, loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("off_policy", MODES)
def test_the_ends_are_the_token_level_loss_and_rao_blackwell(off_policy):
    for discount, end in ((0.0, RaoBlackwellLoss), (1.0, RaoBlackwell)):
        discounted = parts_of(RaoBlackwell(off_policy=off_policy, discount=discount), off_policy != "none")
        expected = parts_of(end(off_policy=off_policy), off_policy != "none")
        for one, other in zip(discounted, expected, strict=True):
            assert torch.equal(one, other)


def test_score_weights_in_plain_loops():
    mask = CASE.sequences[1][ROWS]
    stats = CASE.stats(CASE.policy.logits).map(lambda field: field[ROWS])
    log_ratio, discount = stats.logprobs - stats.ref_logprobs, 0.7
    summands = {
        "RaoBlackwell": lambda row, s, t: stats.kl[row, s] if s > t else 0,
        "RaoBlackwellLite": lambda row, s, t: (
            stats.kl[row, s] if s > t else log_ratio[row, t] - stats.kl[row, t] if s == t else 0
        ),
        "MonteCarloRewardToGo": lambda row, s, t: log_ratio[row, s] if s >= t else 0,
    }
    for name, summand in summands.items():
        expected = torch.zeros(mask.shape, dtype=torch.float64)
        for row, length in enumerate(mask.sum(1).tolist()):
            for t in range(length):
                expected[row, t] = sum(
                    discount ** (s - t) * summand(row, s, t) if s >= t else 0 for s in range(length)
                )
        estimator = getattr(estimators, name)(discount=discount, baseline=None)
        score = estimator.weights(stats, mask).score
        torch.testing.assert_close(score, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("baseline", [None, "leave_one_out"])
@pytest.mark.parametrize("name", KINDS)
def test_the_expected_gradient_is_that_of_the_discounted_credit(name, baseline):
    """Enumerated, by the definition: E sum_t [sum_{s>t} g^(s-t) KL_s grad log p(y_t) + grad KL_t]."""
    tokens, mask = CASE.sequences
    leaf = CASE.policy.logits.clone().requires_grad_()
    stats, probability = CASE.stats(leaf), CASE.policy.logprobs(tokens, mask).exp()
    kl = torch.where(mask, stats.kl, 0)
    distances = torch.arange(4)[None, :] - torch.arange(4)[:, None]
    norms = []
    for discount in (0.0, 0.5, 0.9, 1.0):
        factors = torch.where(distances > 0, discount ** distances.clamp(min=0).double(), 0)
        credit = kl.detach() @ factors.T
        total = ((credit * stats.logprobs + kl) * mask).sum(1)
        (expected,) = torch.autograd.grad(probability @ total, leaf, retain_graph=True)
        options = {"RaoBlackwellTopK": {"k": 2}, "CoarsenedTopK": {"k": 3}}.get(name, {})
        estimator = getattr(estimators, name)(discount=discount, baseline=baseline, **options)
        gradient = expected_gradient(
            CASE,
            estimator,
            1 if baseline is None else 2,
            off_policy=False,
            beta=None,
            variation=Variation("whole", torch.nan),
        )
        assert (gradient - expected).abs().max() < 1e-10
        norms.append((gradient - exact_kl_gradient(CASE.policy, CASE.reference)).norm())
    assert norms[-1] < 1e-10
    assert norms == sorted(norms, reverse=True)
    assert norms[0] > 0.01


@pytest.mark.parametrize("name", KINDS)
def test_a_discount_is_refused_unless_a_bias_is_allowed(name):
    estimator = getattr(estimators, name)(discount=0.5)
    with pytest.raises(ConfigurationError, match=r"refused for training unless allow_biased is true"):
        estimator.check_trainable()
    getattr(estimators, name)(discount=0.5, allow_biased=True).check_trainable()
    assert estimator.bias is not None
    assert "0.5^(s-t)" in estimator.formula


@pytest.mark.parametrize("discount", [-0.1, 1.1, float("nan")])
def test_a_discount_out_of_range_is_named(discount):
    with pytest.raises(ConfigurationError, match="discount: must be between 0 and 1, got"):
        RaoBlackwell(discount=discount)


def test_credit_without_a_future_has_no_discount():
    with pytest.raises(ConfigurationError, match=r"Term.discount: .* and 1 with credit 'whole'"):
        Term("kl", "whole", discount=0.5)
    assert not hasattr(estimators.MonteCarlo(), "discount")


@pytest.mark.parametrize("strict", [False, True])
def test_completions_without_positions_have_no_rewards_to_go(strict):
    assert reward_to_go(torch.zeros(2, 0), strict=strict, discount=0.5).shape == (2, 0)
