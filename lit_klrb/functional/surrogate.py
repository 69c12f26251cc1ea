"""Surrogate losses, whose gradient is a policy gradient: for `.backward()`, not for logging.

Each is a sum over tokens divided by the number of sequences B.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, check_positive
from lit_klrb.functional.credit import MAX_EXPONENT, weighted

# The width of a range around 1 to each side of it, or its two widths: below 1 and above
ClipRange = float | tuple[float, float]


def weighted_loss(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of values, divided by B; with log-probabilities as values, the REINFORCE loss.

    A weight of 0 removes even an infinite value. The loss of no sequences is 0.

    Args:
        values: Differentiable per-token values, 0 outside the mask, shape [B, T].
        weights: Shape [B, T]; detached.

    Example:
        >>> weighted_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[3.0, 0.5]])).item()
        -4.0
    """
    return weighted(weights.detach(), values).sum() / max(len(values), 1)


def clip_widths(clip_range: float | Sequence[float]) -> tuple[float, float]:
    """The widths of a range around 1, below and above.

    Example:
        >>> clip_widths(0.2), clip_widths((0.2, 0.28))
        ((0.2, 0.2), (0.2, 0.28))
    """
    if isinstance(clip_range, int | float):
        return clip_range, clip_range
    if len(clip_range) != 2:
        problem = f"must be one number, or two for below and above 1, got {clip_range}"
        raise ConfigurationError(problem, key="clip_range")
    return clip_range[0], clip_range[1]


def check_clip_range(clip_range: ClipRange) -> None:
    """Check that the widths of a range are positive and finite."""
    for width in clip_widths(clip_range):
        check_positive(clip_range=width)


def clipped_loss(log_ratio: Tensor, weights: Tensor, clip_range: ClipRange) -> Tensor:
    """PPO's clipped loss: max(c w, c clip(w, 1 - below, 1 + above)), with w the ratio.

    The gradient with respect to w is zero where w has left the range in the direction that lowers the loss.

    Args:
        log_ratio: Current minus behaviour log-probability, of tokens or of sequences, shape [B, ...].
        weights: Score weights c (minus the advantages), same shape as `log_ratio`; not detached.
        clip_range: Width of the range around 1 within which w = exp(log_ratio) is not clipped, or two:
            below and above 1, of which the second is often larger ("clip-higher").

    Returns:
        The sum of all entries, divided by B.

    Example:
        >>> ratios = torch.tensor([[0.5, 1.5]])
        >>> round(clipped_loss(ratios.log(), torch.ones(1, 2), clip_range=0.2).item(), 4)
        2.3

    Reference: Schulman et al. (2017), "Proximal policy optimization algorithms", Eq. (7); two widths: Yu et
    al. (2025), "DAPO", arXiv:2503.14476, Eq. (10).
    """
    below, above = clip_widths(clip_range)
    ratio = log_ratio.clamp(max=MAX_EXPONENT).exp()
    clipped = ratio.clamp(1 - below, 1 + above)
    return torch.maximum(weights * ratio, weights * clipped).sum() / max(len(ratio), 1)
