"""The share of the forward KL in a token's own term: expectation, change over a run, limits."""

import pytest
import torch
from enumerated import Case, Variation, expected_gradient

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, MonteCarlo, RaoBlackwell, RaoBlackwellLoss
from lit_klrb.functional.enumeration import exact_kl_gradient

CASE = Case.random(contexts=3, vocab_size=3, max_length=4, seed=8)


def own_terms(share):
    """By the definition, from logits: E sum_t grad [(1 - share) KL(p || q)_t + share KL(q || p)_t]."""
    tokens, mask = CASE.sequences
    leaf = CASE.policy.logits.clone().requires_grad_()
    rows = (type(CASE.policy)(table, 4).token_logits(tokens) for table in (leaf, CASE.reference.logits))
    p, q = (row.log_softmax(-1) for row in rows)
    own = (1 - share) * (p.exp() * (p - q)).sum(-1) + share * (q.exp() * (q - p)).sum(-1)
    probability = CASE.policy.logprobs(tokens, mask).exp()
    return torch.autograd.grad(probability @ torch.where(mask, own, 0).sum(1), leaf)[0]


@pytest.mark.parametrize("off_policy", ["none", "prefix", "sequence"])
@pytest.mark.parametrize("baseline", [None, "leave_one_out"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_expected_gradient_is_that_of_both_kls(share, baseline, off_policy):
    group_size = 1 if baseline is None else 2
    settings = {"baseline": baseline, "off_policy": off_policy}
    measured = {"beta": None, "off_policy": off_policy != "none", "variation": Variation("whole", torch.nan)}
    own = RaoBlackwell(discount=0.0, forward_share=share, **settings)
    found = expected_gradient(CASE, own, group_size, **measured)
    torch.testing.assert_close(found, own_terms(share), rtol=0, atol=1e-10)
    # Credit for later KLs is the same whatever the own term is
    found = expected_gradient(CASE, RaoBlackwell(forward_share=share, **settings), group_size, **measured)
    later = exact_kl_gradient(CASE.policy, CASE.reference) - own_terms(0.0)
    torch.testing.assert_close(found, own_terms(share) + later, rtol=0, atol=1e-10)


def test_both_ends_of_a_run():
    memory = EstimatorMemory(
        RaoBlackwell(discount=0.0, forward_share=1.0), final_discount=1.0, final_forward_share=0.0
    )
    memory.check_trainable()
    assert "the share of the forward KL decreases from 1 to 0 over the run" in memory.passing_bias
    memory.progress = 0.25
    assert memory.estimator == RaoBlackwell(discount=0.25, forward_share=0.75)
    assert memory.estimator.formula == "c_t = sum_{s>t} 0.25^(s-t) KL_s, l_t = 0.25 KL_t + 0.75 KL(q||p)_t"
    memory.progress = 1.0
    assert memory.estimator == RaoBlackwell()
    kept = EstimatorMemory(RaoBlackwell(forward_share=1.0), final_forward_share=0.5)
    with pytest.raises(ConfigurationError, match=r"with forward_share 0\.5 a token's own term is in part"):
        kept.check_trainable()


def test_a_share_is_refused_unless_a_bias_is_allowed_and_takes_no_fused_loss():
    with pytest.raises(ConfigurationError, match="with forward_share 1 a token's own term is in part KL"):
        RaoBlackwell(forward_share=1.0).check_trainable()
    RaoBlackwell(forward_share=1.0, allow_biased=True).check_trainable()
    assert RaoBlackwell().is_fusable
    assert not RaoBlackwell(forward_share=0.1).is_fusable


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_named(share):
    with pytest.raises(ConfigurationError, match="forward_share: must be between 0 and 1, got"):
        RaoBlackwell(forward_share=share)
    with pytest.raises(ConfigurationError, match="final_forward_share: must be between 0 and 1, got"):
        EstimatorMemory(RaoBlackwell(), final_forward_share=share)


@pytest.mark.parametrize("estimator", [MonteCarlo(), RaoBlackwellLoss()])
def test_estimators_without_such_a_share_are_named(estimator):
    with pytest.raises(
        ConfigurationError, match=f"final_forward_share: {type(estimator).__name__} has no forward_share"
    ):
        EstimatorMemory(estimator, final_forward_share=0.0)


def test_statistics_without_it_are_refused():
    _, stats = CASE.current()
    mask = CASE.sequences[1]
    with pytest.raises(ConfigurationError, match=r"stats.forward_kl is None"):
        RaoBlackwell(baseline=None, forward_share=0.5).surrogate(stats._replace(forward_kl=None), mask)
