"""KL values: estimates of KL(policy || reference) in nats, for logging and for rewards.

Differentiating a value is in general not an estimate of the KL's gradient: train with `lit_klrb.estimators`.
"""

import warnings

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.baselines import check_group_size
from lit_klrb.functional.credit import MAX_EXPONENT
from lit_klrb.functional.logprobs import TokenStats

# One completion with more than this share of the variance makes the fit an accident; of three or fewer, one
# always has about as much.
_HEAVY_SHARE, _ENOUGH_TO_TELL = 0.5, 4
# From here down p / (1 - (1 - p)^M) is 1 / M to float64's precision, and p would underflow.
_UNLIKELY = -60.0


def kl_k1_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The log ratio log p(y_t) - log q(y_t): unbiased, of either sign.

    Args:
        logprobs: Log-probability of each sampled token under the policy, shape [B, T].
        ref_logprobs: The same tokens under the reference, shape [B, T].

    Example:
        >>> p, q = torch.tensor([0.25]), torch.tensor([0.05])
        >>> round(kl_k1_per_token(p.log(), q.log()).item(), 3)
        1.609

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return logprobs - ref_logprobs


def kl_k2_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log ratio: biased, small for models that are close.

    Args:
        logprobs: Log-probability of each sampled token under the policy, shape [B, T].
        ref_logprobs: The same tokens under the reference, shape [B, T].

    Example:
        >>> kl_k2_per_token(torch.tensor([-1.0]), torch.tensor([-3.0])).item()
        2.0

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return (logprobs - ref_logprobs).square() / 2


def kl_k3_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimate r + exp(-r) - 1 with r the log ratio: unbiased and never negative.

    Args:
        logprobs: Log-probability of each sampled token under the policy, shape [B, T].
        ref_logprobs: The same tokens under the reference, shape [B, T].

    Returns:
        Shape [B, T]; -r is cut at `MAX_EXPONENT` before `exp`.

    Example:
        >>> round(kl_k3_per_token(torch.tensor([0.0]), torch.tensor([1.0])).item(), 4)
        0.7183

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return kl_control_variate(logprobs - ref_logprobs, alpha=1.0)


def kl_control_variate(log_ratio: Tensor, alpha: float | Tensor) -> Tensor:
    """R + alpha (exp(-R) - 1): unbiased for every alpha that does not depend on R, since E exp(-R) = 1.

    Args:
        log_ratio: Log ratios R, of tokens or of whole sequences, any shape.
        alpha: 1 is Schulman's k3, never negative, and of unbounded variance for whole sequences.

    Returns:
        The shape of `log_ratio`; -R is cut at `MAX_EXPONENT` before `exp`.

    Example:
        >>> kl_control_variate(torch.tensor([0.5]), alpha=0.0).item()
        0.5
    """
    return log_ratio + alpha * torch.expm1((-log_ratio).clamp(max=MAX_EXPONENT))


def kl_k3_increments(log_ratio: Tensor) -> Tensor:
    """Per-token increments of k3 of the running log ratio; they add up to k3 of the whole sequence.

    Args:
        log_ratio: Log ratio of each token, 0 outside the mask, shape [B, T].

    Example:
        >>> r = torch.tensor([[0.5, -0.25]])
        >>> bool(kl_k3_increments(r).sum() == kl_control_variate(r.sum(), alpha=1.0))
        True
    """
    running = kl_control_variate(log_ratio.cumsum(-1), alpha=1.0)
    return running.diff(dim=-1, prepend=torch.zeros_like(running[:, :1]))


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
    # Equal numbers differ from their mean by rounding, which is not to be fitted
    if spread.abs().max() <= 4 * torch.finfo(weights.dtype).eps * weights.max():
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
    probability = logprobs.double().clamp(_UNLIKELY, 0).exp()
    # log1p(-1) is -inf, and 1 - exp(-inf) is 1: a certain completion is certainly among the draws.
    inclusion = -torch.expm1(group_size * torch.log1p(-probability))
    kept = torch.where(mask, completions, -1)
    groups = kept.view(-1, group_size, kept.shape[-1])
    same = (groups[:, :, None] == groups[:, None]).all(-1)
    repeated = same.tril(-1).any(-1).flatten()
    estimates = torch.where(repeated, 0, probability / inclusion * log_ratio.double())
    return estimates.view(-1, group_size).sum(1).to(log_ratio.dtype)


def cross_fitted_control_variate(log_ratio: Tensor, group_size: int) -> Tensor:
    """`kl_control_variate` of each completion, alpha fitted on the other half of the prompts: unbiased.

    Args:
        log_ratio: Log ratio R of each completion, summed over its tokens, [B]; the completions of a prompt
            are adjacent.
        group_size: Completions of each prompt.

    Returns:
        Shape [B]. Prompts alternate between the halves.

    Raises:
        ConfigurationError: If `group_size` does not divide B, or a half has fewer than two completions.

    Example:
        >>> log_ratio = torch.tensor([0.5, 0.1, -0.2, 0.4])
        >>> alpha = fit_control_variate(log_ratio[[1, 3]])
        >>> cross_fitted = cross_fitted_control_variate(log_ratio, group_size=1)
        >>> torch.equal(cross_fitted[[0, 2]], kl_control_variate(log_ratio[[0, 2]], alpha))
        True
    """
    check_group_size(len(log_ratio), group_size)
    prompt = torch.arange(len(log_ratio), device=log_ratio.device) // group_size
    even = prompt % 2 == 0
    alpha = torch.where(even, fit_control_variate(log_ratio[~even]), fit_control_variate(log_ratio[even]))
    return kl_control_variate(log_ratio, alpha)


def kl_values(
    stats: TokenStats, mask: Tensor, completions: Tensor, *, group_size: int, alpha: float = 1.0
) -> dict[str, Tensor]:
    """Every value of KL(policy || reference) side by side, in nats per sequence.

    `clustered_mean` of each gives its mean and a standard error clustered by prompt.

    Args:
        stats: Statistics of completions drawn from the policy, fields [B, T]; the completions of a prompt
            are adjacent.
        mask: Completion tokens, [B, T].
        completions: Token ids, [B, T].
        group_size: Completions of each prompt (K).
        alpha: Of the control variate "cv"; 1 is Schulman's.

    Returns:
        By name, one value a completion, [P, K]; one a prompt, [P, 1], for "ht". In expectation: "k1", "k3",
        "cv" (fixed alpha), "cv_fitted" (alpha from the other half of the prompts), "ht" and "rb" (only if
        `stats.kl` is there) are the KL; "k2" is half the second moment of the tokens' log ratios.

    Raises:
        ConfigurationError: If `group_size` does not divide B, or there are too few completions to fit alpha.

    Example:
        A coin that shows heads with probability 0.7, thrown twice two times, against a fair one.

        >>> from lit_klrb.functional import clustered_mean
        >>> coins = torch.tensor([[0], [1], [0], [0]])
        >>> stats = TokenStats(torch.tensor([0.7, 0.3])[coins].log(), torch.full((4, 1), 0.5).log())
        >>> values = kl_values(stats, coins >= 0, coins, group_size=2)
        >>> mean, error = clustered_mean(values["k1"])
        >>> f"{mean:.3f} ± {error:.3f}"
        '0.125 ± 0.212'
    """
    stats = stats.masked(mask)
    tokens = stats.logprobs, stats.ref_logprobs
    log_ratio = kl_k1_per_token(*tokens).sum(-1)
    values = {
        "k1": log_ratio,
        "k2": kl_k2_per_token(*tokens).sum(-1),
        "k3": kl_k3_per_token(*tokens).sum(-1),
        "cv": kl_control_variate(log_ratio, alpha),
        "cv_fitted": cross_fitted_control_variate(log_ratio, group_size),
    }
    if stats.kl is not None:
        values["rb"] = stats.kl.sum(-1)
    by_prompt = {name: value.view(-1, group_size) for name, value in values.items()}
    by_prompt["ht"] = horvitz_thompson(log_ratio, stats.logprobs.sum(-1), completions, mask, group_size)[
        :, None
    ]
    return by_prompt
