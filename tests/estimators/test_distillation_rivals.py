"""The on-policy distillation of other software against replication/evidence/distillation_rivals.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from enumerated import Variation, expected_gradient
from test_names_in_use import CASE, per_completion

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import K2Loss, MonteCarloRewardToGo, RaoBlackwellLoss, Recipe, Term
from lit_klrb.functional.enumeration import exact_kl_gradient
from replication.rivals import MiniLLM, PositionWeighted

PAGE = Path(__file__).parents[2] / "replication" / "evidence" / "distillation_rivals.md"
NAMES: dict = {"__name__": "my_minillm"}
exec(re.search("```python\n(# my_minillm.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1], NAMES)
SampledFuture = NAMES["SampledFuture"]


def test_the_arm_of_comparisons_is_the_class_of_the_page():
    assert MiniLLM.recipe == SampledFuture.recipe


def tinker(kl_discount_factor):
    """`incorporate_kl_penalty` and `discounted_future_sum_vectorized`: minus the advantages."""

    def credit(r):
        if kl_discount_factor == 0:
            return r
        running, found = 0.0, []
        for one in reversed(r.tolist()):
            running = one + kl_discount_factor * running
            found.insert(0, running)
        return torch.tensor(found, dtype=r.dtype)

    return credit


def minillm(gamma):
    """`_get_advantages_and_returns`, without its division by the number of tokens from t on: minus them."""

    def credit(r):
        return torch.stack([sum(gamma ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))])

    return credit


def trl_minillm(r):
    """`_compute_advantage` with gamma 0: minus the advantages."""
    return r


def iw_opd(r):
    """`_compute_iw_opd_loss` with gamma 0.5: minus the advantages."""
    sizes = [abs(x) for x in r.tolist()]
    weights = [1.5 - 0.5 * sum(sizes[:t]) / sum(sizes) for t in range(len(r))]
    return r * torch.tensor(weights, dtype=r.dtype)


def loss_of(credit, adds_exact_kl):
    """Their loss on one completion: minus advantages times log-probabilities, and the KL of each token."""

    def loss(stats, mask, old):
        p, q, kl = stats.logprobs[mask], stats.ref_logprobs[mask], stats.kl[mask]
        return (credit((p - q).detach()) * p).sum() + adds_exact_kl * kl.sum()

    return loss


RIVALS = {
    "Tinker": (tinker(0.0), False, K2Loss(baseline=None)),
    "SDPO, sampled_token": (lambda r: r, False, K2Loss(baseline=None)),
    "Tinker, discount": (tinker(0.6), False, MonteCarloRewardToGo(discount=0.6, baseline=None)),
    "GKD, SDPO full_logits": (torch.zeros_like, True, RaoBlackwellLoss(baseline=None)),
    "TRL's MiniLLM": (trl_minillm, True, SampledFuture(discount=0.0, baseline=None)),
    "IW-OPD": (iw_opd, False, PositionWeighted(baseline=None)),
    "MiniLLM": (minillm(0.95), True, SampledFuture(discount=0.95, baseline=None)),
}


@pytest.mark.parametrize("name", RIVALS)
def test_every_completion_has_the_gradient_of_the_configuration_that_is_named(name):
    credit, adds_exact_kl, estimator = RIVALS[name]
    estimator = replace(estimator, allow_biased=True)
    theirs = per_completion(loss_of(credit, adds_exact_kl), off_policy=False)
    ours = per_completion(lambda stats, mask, old: estimator.surrogate(stats, mask), off_policy=False)
    assert (theirs - ours).abs().max() < 1e-12
    assert ours.abs().max() > 0.1
    others = [other for other in RIVALS if type(RIVALS[other][2]) is not type(estimator)]
    for other in others:
        found = per_completion(loss_of(*RIVALS[other][:2]), off_policy=False)
        assert (found - ours).abs().max() > 1e-3, other


def expected(estimator):
    return expected_gradient(
        CASE, estimator, 1, off_policy=False, beta=None, variation=Variation("whole", torch.nan)
    )


def test_the_sampled_future_from_the_own_token_on_counts_it_twice():
    exact = exact_kl_gradient(CASE.policy, CASE.reference)
    own = expected(RaoBlackwellLoss(baseline=None))
    assert own.norm() > 0.1
    assert (expected(SampledFuture(baseline=None)) - exact - own).abs().max() < 1e-10

    class After(SampledFuture):
        recipe = Recipe(value="kl", score=(Term("k1", "after"),), pathwise="kl")

    assert (expected(After(baseline=None)) - exact).abs().max() < 1e-10
    with pytest.raises(ConfigurationError, match="counts the own token twice"):
        SampledFuture().check_trainable()
