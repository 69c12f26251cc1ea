"""Scalar losses whose gradient is a policy gradient: for `.backward()`, not for logging.

All return sums over tokens, divided by the number of sequences B.
"""

import torch
from torch import Tensor

from lit_klrb.functional.credit import MAX_EXPONENT


def weighted_loss(values: Tensor, weights: Tensor) -> Tensor:
    """The sum of weights times values over B: with log-probabilities for values, a policy gradient's loss.

    Args:
        values: Differentiable per-token values, 0 outside the mask, shape [B, T].
        weights: Shape [B, T]; taken as constants (gradients stop here).

    Example:
        >>> weighted_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[3.0, 0.5]])).item()
        -4.0
    """
    return (weights.detach() * values).sum() / len(values)


def clipped_loss(log_ratio: Tensor, weights: Tensor, clip_range: float) -> Tensor:
    """PPO's pessimistic surrogate, to be minimised: max(c w, c clip(w, 1 - clip_range, 1 + clip_range)).

    No gradient in the ratio w where it has moved past the range in the direction that lowers the loss.

    Args:
        log_ratio: Current minus behaviour log-probability, of tokens or of sequences, shape [B, ...].
        weights: Score weights c (minus the advantages), the shape of `log_ratio`; gradients flow here too.
        clip_range: Half-width of the range of the ratio w = exp(log_ratio) around 1.

    Returns:
        The sum over B.

    Example:
        >>> ratios = torch.tensor([[0.5, 1.5]])
        >>> round(clipped_loss(ratios.log(), torch.ones(1, 2), clip_range=0.2).item(), 4)
        2.3

    Reference: Schulman et al. (2017), "Proximal policy optimization algorithms", Eq. (7).
    """
    ratio = log_ratio.clamp(max=MAX_EXPONENT).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(weights * ratio, weights * clipped).sum() / len(ratio)
