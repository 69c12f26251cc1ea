"""KL values: estimates of KL(policy || reference) in nats, for logging and for rewards.

`logprobs` and `ref_logprobs` are the log-probabilities of each sampled token under policy and reference,
shape [B, T], as is an estimate per token.

Differentiating a value is in general not an estimate of the KL's gradient: train with `lit_klrb.estimators`.
"""

import warnings

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.baselines import check_group_size
from lit_klrb.functional.checks import check_mask
from lit_klrb.functional.credit import MAX_EXPONENT, running_sum
from lit_klrb.functional.logprobs import TokenStats

# A fit is unreliable if one completion accounts for more than this share of the variance. Among fewer than
# four completions one nearly always does, so no warning is given there.
_MAX_VARIANCE_SHARE, _MIN_COMPLETIONS_TO_WARN = 0.5, 4
# Below this log-probability p / (1 - (1 - p)^M) equals 1 / M in float64; clamping keeps p from underflowing.
_MIN_LOGPROB = -60.0


def kl_k1_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k1 estimate, the log ratio log p(y_t) - log q(y_t), [B, T]: unbiased; can be negative.

    Example:
        >>> p, q = torch.tensor([0.25]), torch.tensor([0.05])
        >>> round(kl_k1_per_token(p.log(), q.log()).item(), 3)
        1.609

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return logprobs - ref_logprobs


def kl_k2_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k2 estimate, half the squared log ratio, [B, T]: never negative; biased, little for similar models.

    Example:
        >>> kl_k2_per_token(torch.tensor([-1.0]), torch.tensor([-3.0])).item()
        2.0

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return (logprobs - ref_logprobs).square() / 2


def kl_k3_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimate r + exp(-r) - 1 of the log ratio r, [B, T]: unbiased and never negative.

    -r is clamped to at most `MAX_EXPONENT` before `exp`.

    Example:
        >>> round(kl_k3_per_token(torch.tensor([0.0]), torch.tensor([1.0])).item(), 4)
        0.7183

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return kl_control_variate(logprobs - ref_logprobs, alpha=1.0)


def kl_control_variate(log_ratio: Tensor, alpha: float | Tensor) -> Tensor:
    """R + alpha (exp(-R) - 1): unbiased for every alpha that does not depend on R, since E exp(-R) = 1.

    Args:
        log_ratio: Log ratios R of tokens or of whole sequences, any shape.
        alpha: Coefficient of the control variate. 1 gives Schulman's k3, which is never negative but has
            unbounded variance for whole sequences.

    Returns:
        Same shape as `log_ratio`; -R is clamped to at most `MAX_EXPONENT` before `exp`.

    Example:
        >>> kl_control_variate(torch.tensor([0.5]), alpha=0.0).item()
        0.5
    """
    return log_ratio + alpha * torch.expm1((-log_ratio).clamp(max=MAX_EXPONENT))


def kl_k3_increments(log_ratio: Tensor) -> Tensor:
    """Per-token increments of k3 of the cumulative log ratio; they sum to k3 of the whole sequence.

    Args:
        log_ratio: Log ratio of each token, 0 outside the mask, shape [B, T].

    Example:
        >>> r = torch.tensor([[0.5, -0.25]])
        >>> bool(kl_k3_increments(r).sum() == kl_control_variate(r.sum(), alpha=1.0))
        True
    """
    running = kl_control_variate(running_sum(log_ratio), alpha=1.0)
    before = torch.nn.functional.pad(running[:, :-1], (1, 0)) if running.shape[1] else running
    return torch.where(before == torch.inf, 0, running - before)  # +inf once, rather than inf - inf


def fit_control_variate(log_ratio: Tensor) -> Tensor:
    """The alpha that minimises the variance of `kl_control_variate` on these completions.

    alpha* = -Cov(R, exp(-R)) / Var(exp(-R)). The estimate stays unbiased only if alpha does not depend on the
    completions it is used for, so fit it on others. exp(-R) has heavy tails where policy and reference
    differ: a warning is given if a single completion dominates the fit. Completions that the reference
    excludes, R = +inf, are left out: no alpha makes their estimate finite.

    Args:
        log_ratio: Log ratio R of each held-out completion, summed over its tokens, shape [M].

    Returns:
        A scalar; 0 (plain Monte Carlo) if exp(-R) is constant.

    Raises:
        ConfigurationError: If there are fewer than two completions.

    Example:
        >>> round(fit_control_variate(torch.tensor([-0.1, 0.0, 0.1])).item(), 3)
        0.998

    Reference: Amini, Vieira, Cotterell (2025), arXiv:2504.10637, Section 3.
    """
    if len(log_ratio) < 2:
        problem = f"must have at least 2 completions for a fit, got {len(log_ratio)}"
        raise ConfigurationError(problem, key="log_ratio")
    log_ratio = log_ratio[log_ratio < torch.inf]
    if len(log_ratio) < 2:
        return log_ratio.new_zeros(())
    weights = (-log_ratio).clamp(max=MAX_EXPONENT).exp()
    deviations = weights - weights.mean()
    squares = deviations.square()
    # Equal weights differ from their mean by rounding errors, which must not be fitted
    if deviations.abs().max() <= 4 * torch.finfo(weights.dtype).eps * weights.max():
        return torch.zeros_like(squares[0])
    share = (squares.max() / squares.sum()).item()
    if share > _MAX_VARIANCE_SHARE and len(log_ratio) >= _MIN_COMPLETIONS_TO_WARN:
        warnings.warn(
            f"one of {len(log_ratio)} completions has {share:.0%} of the variance of exp(-R) and dominates"
            " the fitted alpha: use alpha = 0 or more completions",
            stacklevel=2,
        )
    return -(deviations * (log_ratio - log_ratio.mean())).sum() / squares.sum()


def horvitz_thompson(
    log_ratio: Tensor, logprobs: Tensor, completions: Tensor, mask: Tensor, group_size: int
) -> Tensor:
    """Horvitz-Thompson estimate of the KL, unbiased: the sum over distinct completions of p(y) R(y) / pi(y).

    pi(y) = 1 - (1 - p(y))^M is the probability that y is among M samples. If the M completions of a prompt
    are distinct and each is improbable, the estimate equals the Monte-Carlo mean; its variance is smaller
    where completions repeat.

    Args:
        log_ratio: Log ratio R of each completion, summed over its tokens, shape [B], prompt-major.
        logprobs: Log-probability of each completion under the policy, summed over its tokens, shape [B].
        completions: Token ids, shape [B, T].
        mask: True on completion tokens, shape [B, T].
        group_size: Completions per prompt (M).

    Returns:
        One estimate per prompt, shape [B / M].

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
    check_mask(mask, tuple(completions.shape))
    probability = logprobs.double().clamp(_MIN_LOGPROB, 0).exp()
    # A completion of probability 1 needs no special case: log1p(-1) is -inf, and 1 - exp(-inf) is 1
    inclusion = -torch.expm1(group_size * torch.log1p(-probability))
    # Completions are equal if they agree inside the mask: -1 replaces whatever padding holds
    unpadded = torch.where(mask, completions, -1)
    groups = unpadded.view(len(log_ratio) // group_size, group_size, unpadded.shape[-1])
    equal = (groups[:, :, None] == groups[:, None]).all(-1)
    # Keep the first occurrence of each completion; the lower triangle compares with earlier ones
    repeated = equal.tril(-1).any(-1).flatten()
    estimates = torch.where(repeated, 0, probability / inclusion * log_ratio.double())
    return estimates.view(-1, group_size).sum(1).to(log_ratio.dtype)


def cross_fitted_control_variate(log_ratio: Tensor, group_size: int) -> Tensor:
    """`kl_control_variate` with alpha fitted on the other half of the prompts: unbiased.

    Args:
        log_ratio: Log ratio R of each completion, summed over its tokens, shape [B], prompt-major.
        group_size: Completions per prompt.

    Returns:
        One estimate per completion, shape [B]. Prompts alternate between the two halves.

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
    """All estimates of KL(policy || reference) on the same completions, in nats per sequence.

    `clustered_mean` of an entry is its mean with a standard error clustered by prompt.

    Args:
        stats: Statistics of completions sampled from the policy, fields [B, T], prompt-major.
        mask: True on completion tokens, shape [B, T].
        completions: Token ids, shape [B, T].
        group_size: Completions per prompt (K).
        alpha: Coefficient of the control variate "cv"; 1 gives Schulman's k3.

    Returns:
        A dictionary from names to estimates, one per completion, shape [P, K], or for "ht" one per prompt,
        shape [P, 1]. Unbiased are "k1", "k3", "cv" (fixed alpha), "cv_fitted" (alpha fitted on the other half
        of the prompts), "ht" (Horvitz-Thompson) and "rb" (Rao-Blackwell, only if `stats.kl` is given). "k2"
        estimates half the second moment of the tokens' log ratios instead.

    Raises:
        ConfigurationError: If `group_size` does not divide B, or there are too few completions to fit alpha.

    Example:
        Four tosses of a coin that shows heads with probability 0.7, in two groups; the reference is fair.

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
    distinct = horvitz_thompson(log_ratio, stats.logprobs.sum(-1), completions, mask, group_size)
    return {**by_prompt, "ht": distinct[:, None]}
