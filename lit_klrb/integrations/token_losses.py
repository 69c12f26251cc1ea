"""An estimator's gradient as one loss per token, for trainers that reduce such losses themselves."""

import torch
from torch import Tensor

from lit_klrb.estimators.base import KLEstimator
from lit_klrb.functional.logprobs import TokenStats


def token_losses(
    estimator: KLEstimator,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    group_size: int = 1,
) -> Tensor:
    """Losses per token whose sum over tokens and mean over completions has the gradient of the surrogate.

    Only their gradients mean something: each is the log-probability times what the surrogate's gradient has
    for it. A trainer may divide them by numbers of tokens, split them into micro-batches, and sum them.

    Args:
        estimator: One of sampled log-probabilities, such as `MonteCarloRewardToGo(off_policy="prefix")`,
            without a baseline where `group_size` is 1.
        logprobs: Of the sampled tokens, shape [B, T], differentiable.
        ref_logprobs: Those of the reference or teacher, shape [B, T].
        old_logprobs: Those of the policy that the tokens are from, shape [B, T]; read with `off_policy`.
        mask: True on completion tokens, shape [B, T].
        group_size: Completions per prompt, which are adjacent.

    Returns:
        Shape [B, T], 0 outside the mask.

    Example:
        >>> from lit_klrb.estimators import K2Loss
        >>> logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> mask, reference = torch.ones(1, 2) > 0, torch.zeros(1, 2)
        >>> k2 = K2Loss(baseline=None, allow_biased=True)
        >>> losses = token_losses(k2, logprobs, reference, logprobs, mask)
        >>> torch.autograd.grad(losses.sum(), logprobs)[0]
        tensor([[-1., -2.]])
    """
    behaviour = None if estimator.off_policy == "none" else old_logprobs.detach()
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        stats = TokenStats(leaf, ref_logprobs.detach())
        loss = estimator.surrogate(stats, mask, group_size=group_size, behaviour_logprobs=behaviour)
        (slope,) = torch.autograd.grad(loss, leaf)
    return len(leaf) * slope * torch.where(mask, logprobs, 0)
