"""Values of KL(policy || reference) that look at more than one completion."""

import warnings

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.credit import MAX_EXPONENT, check_group_size

# One completion with more than this share of the variance makes the fit an accident; of three or fewer, one
# always has about as much.
_HEAVY_SHARE, _ENOUGH_TO_TELL = 0.5, 4


def fit_control_variate(log_ratio: Tensor) -> Tensor:
    """The alpha for `kl_control_variate` that gives the least variance on these completions.

    alpha* = -Cov(R, exp(-R)) / Var(exp(-R)). Fit it on completions other than those it is used for: only an
    alpha that does not depend on them leaves the estimate unbiased. exp(-R) has heavy tails as soon as policy
    and reference differ; a warning says when one completion decides the fit.

    Args:
        log_ratio: Log ratio R of each held-out completion, summed over its tokens, [M].

    Returns:
        Scalar; 0 (plain Monte Carlo) where exp(-R) does not vary.

    Raises:
        ConfigurationError: If there are fewer than two completions.

    Example:
        >>> round(fit_control_variate(torch.tensor([-0.1, 0.0, 0.1])).item(), 3)
        0.998

    Reference: Amini, Vieira, Cotterell (2025), arXiv:2504.10637, Section 3.
    """
    if len(log_ratio) < 2:
        raise ConfigurationError(f"log_ratio has {len(log_ratio)} completions; a fit needs at least 2")
    weights = (-log_ratio).clamp(max=MAX_EXPONENT).exp()
    spread = weights - weights.mean()
    squares = spread.square()
    if squares.sum() == 0:
        return torch.zeros_like(squares[0])
    share = (squares.max() / squares.sum()).item()
    if share > _HEAVY_SHARE and len(log_ratio) >= _ENOUGH_TO_TELL:
        warnings.warn(
            f"one of {len(log_ratio)} completions has {share:.0%} of the variance of exp(-R): the fitted"
            " alpha rests on it, use alpha = 0 or more completions",
            stacklevel=2,
        )
    return -(spread * (log_ratio - log_ratio.mean())).sum() / squares.sum()


def horvitz_thompson(
    log_ratio: Tensor, logprobs: Tensor, completions: Tensor, mask: Tensor, group_size: int
) -> Tensor:
    """For each prompt the sum over its distinct completions of p(y) / pi(y) R(y): unbiased.

    pi(y) = 1 - (1 - p(y))^M is the chance that y is among M draws. Where all M differ and each is unlikely
    this is the Monte-Carlo mean; it gains where completions repeat.

    Args:
        log_ratio: Log ratio R of each completion, summed over its tokens, [B]; the M completions of a prompt
            are adjacent.
        logprobs: Log-probability of each completion under the policy, summed over its tokens, [B].
        completions: Token ids, [B, T].
        mask: Completion tokens, [B, T].
        group_size: Completions of each prompt (M).

    Returns:
        One estimate a prompt, [B / M].

    Raises:
        ConfigurationError: If `group_size` does not divide B.

    Example:
        >>> certain = torch.zeros(2)
        >>> same = torch.tensor([[3], [3]])
        >>> horvitz_thompson(certain + 0.7, certain, same, same > 0, group_size=2).tolist()
        [0.699999988079071]

    Reference: Amini, Vieira, Cotterell (2025), arXiv:2504.10637, after Horvitz, Thompson (1952).
    """
    check_group_size(len(log_ratio), group_size)
    kept = torch.where(mask, completions, -1)
    probability = logprobs.double().exp()
    # log1p(-1) is -inf, and 1 - exp(-inf) is 1: a certain completion is certainly among the draws.
    inclusion = -torch.expm1(group_size * torch.log1p(-probability))
    terms = probability / inclusion * log_ratio.double()
    estimates = []
    for start in range(0, len(kept), group_size):
        rows = kept[start : start + group_size]
        first = [not any(torch.equal(rows[i], rows[j]) for j in range(i)) for i in range(group_size)]
        estimates.append(terms[start : start + group_size][torch.tensor(first)].sum())
    return torch.stack(estimates).to(log_ratio.dtype)
