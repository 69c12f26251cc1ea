"""An estimator's gradient as losses of tokens."""

import pytest
import torch

from lit_klrb.cli.loss_roles import BoundLoss
from lit_klrb.estimators import K3Loss, MonteCarloRewardToGo
from lit_klrb.estimators.certificate import certify
from lit_klrb.functional import TokenStats
from lit_klrb.integrations.token_losses import token_losses


@pytest.mark.parametrize("off_policy", ["none", "prefix"])
def test_the_gradient_is_that_of_the_kl(off_policy):
    """By enumeration; on stale samples, too, with the importance weights of prefixes."""
    estimator = MonteCarloRewardToGo(baseline=None, off_policy=off_policy)

    def loss(logprobs, ref_logprobs, old_logprobs, mask):
        return token_losses(estimator, logprobs, ref_logprobs, old_logprobs, mask)

    found = certify(BoundLoss("loss", loss, {}, {}), takes_old=True)
    assert (found.on_policy.name, found.padding) == ("kl", 0)
    assert found.off_policy.name == ("kl" if off_policy == "prefix" else None)


def test_the_losses_of_a_group_are_those_of_the_surrogate():
    generator = torch.Generator().manual_seed(0)
    logprobs, ref_logprobs = -torch.rand(2, 4, 3, generator=generator)
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [True, True, True]])
    leaf = logprobs.requires_grad_()
    for estimator in (MonteCarloRewardToGo(), K3Loss(allow_biased=True)):
        losses = token_losses(estimator, leaf, ref_logprobs, leaf, mask, group_size=2)
        whole = estimator.surrogate(TokenStats(leaf, ref_logprobs), mask, group_size=2)
        (by_token,), (at_once,) = (torch.autograd.grad(x, leaf) for x in (losses.sum() / 4, whole))
        assert torch.allclose(by_token, at_once)
        assert not losses[~mask].any()
