"""Baselines of the reward from the literature: their effect on the variance of the policy gradient."""

from typing import Any

import torch
from torch import Tensor

from lit_klrb.functional import leave_one_out_baseline
from lit_klrb.studies.base import rounded
from replication.rivals import james_stein_baseline
from replication.studies.tabular import TabularPairs

# Prompts per simulated batch, completions per prompt, and spreads of the prompts' mean rewards.
_PROMPTS, _COMPLETIONS, _SPREADS = 8, (2, 4, 8), (0.0, 0.5, 3.0)


def token_baseline_variances(pairs: TabularPairs) -> dict[str, Any]:
    """Variance of the gradient of E[reward] with oracle baselines, relative to that of the mean reward.

    The gradient is sum_t (r - b_t) grad log p(y_t) of one completion, exactly enumerated. `cumulative` is the
    optimal token baseline of arXiv:2602.07078 with its expectations known,
    b_t = E[r W_t] / E[W_t], W_t = sum_{s<=t} |grad log p(y_s)|^2; `own` uses the norm of token t alone.
    Tables have a row per prefix, so tokens do not share parameters, or one row for all.

    Args:
        pairs: Policies with rewards.

    Returns:
        `own` and `cumulative` for tables with and without sharing, one ratio per policy.
    """
    assert pairs.rewards is not None
    shared = TabularPairs(pairs.policies[:, :1], pairs.references, pairs.max_length, pairs.rewards)
    return {name: _token_baselines(case) for name, case in (("row_per_prefix", pairs), ("one_row", shared))}


def _token_baselines(pairs: TabularPairs) -> dict[str, Any]:
    assert pairs.rewards is not None
    found: dict[str, list[Tensor]] = {"own": [], "cumulative": []}
    probabilities = pairs.logprobs(pairs.policies).exp()
    for table, p, reward in zip(pairs.policies, probabilities, pairs.rewards, strict=True):
        scores = _token_scores(pairs, table)  # [N, T, parameters]
        squares = scores.square().sum(-1)
        constant = (p @ reward).expand(squares.shape[1])
        usual = _trace(p, reward, scores, constant)
        for name, weight in (("own", squares), ("cumulative", squares.cumsum(1))):
            # Positions that no completion reaches have no weight
            mass = torch.einsum("n,nt->t", p, weight)
            baseline = torch.einsum("n,nt->t", p * reward, weight) / mass.clamp(min=1e-300)
            found[name].append(_trace(p, reward, scores, baseline) / usual)
    return {name: rounded(torch.stack(ratios), 6) for name, ratios in found.items()}


def _token_scores(pairs: TabularPairs, table: Tensor) -> Tensor:
    """Gradient of each token's log-probability in the logits, 0 outside the mask, [N, T, parameters]."""

    def logprobs(logits: Tensor) -> Tensor:
        chosen = logits.log_softmax(-1)[pairs.prefixes % len(logits), pairs.tokens]
        return torch.where(pairs.mask, chosen, 0)

    return torch.autograd.functional.jacobian(logprobs, table).flatten(2)


def _trace(p: Tensor, reward: Tensor, scores: Tensor, baseline: Tensor) -> Tensor:
    """Trace of the covariance of sum_t (r - b_t) grad log p(y_t)."""
    gradients = ((reward[:, None] - baseline)[..., None] * scores).sum(1)
    mean = p @ gradients
    return p @ (gradients - mean).square().sum(1)


def shrinkage_variances(seed: int, batches: int) -> dict[str, Any]:
    """Mean squared error of a shrunk leave-one-out baseline, relative to the leave-one-out mean.

    Rewards are normal within a prompt with unit variance, and prompts' means are normal with the given
    spread. The part of the gradient's variance that a baseline adds is proportional to its mean squared
    error around the prompt's mean, as the baseline does not depend on the completion.

    Args:
        seed: Seed of the rewards.
        batches: Simulated batches of 8 prompts.

    Returns:
        By spread and completions per prompt: the ratio, and its standard error over batches.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for spread in _SPREADS:
        for count in _COMPLETIONS:
            shape = batches, _PROMPTS, count
            means = spread * torch.randn(*shape[:2], 1, dtype=torch.float64, generator=generator)
            rewards = means + torch.randn(*shape, dtype=torch.float64, generator=generator)
            rows = rewards.flatten(1)
            baselines = leave_one_out_baseline(rows.T, count).T, james_stein_baseline(rows, count)
            usual, shrunk = ((b.view(shape) - means).square().mean((1, 2)) for b in baselines)
            ratio = shrunk.mean() / usual.mean()
            error = (shrunk - ratio * usual).std() / usual.mean() / batches**0.5
            found[f"spread {spread:g}, {count} completions"] = {
                "ratio": float(f"{ratio.item():.6g}"),
                "standard_error": float(f"{error.item():.3g}"),
            }
    return found
