"""Stratified completions with and without a leave-one-out baseline, exactly."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_klrb.studies.base import rounded
from replication.studies.tabular import TabularPairs


def stratified_moments(pairs: TabularPairs, sizes: Sequence[int]) -> dict[str, Any]:
    """What one random shift of K completions does to values and gradients, for each pair of models.

    The completions are a step function of the shift, so expectations are finite sums over its steps.

    Args:
        pairs: Pairs of models.
        sizes: Numbers of completions (K).

    Returns:
        By K: `variance`, that of the mean of k1 over K completions relative to independent ones;
        `bias`, the distance of the expected Monte-Carlo gradient with leave-one-out from the exact gradient,
        relative to the latter's norm; `bias_without_baseline`, the same without leave-one-out.
    """
    exact, scores = pairs.exact_gradient(), completion_scores(pairs)
    logprobs, ref_logprobs = pairs.logprobs(pairs.policies), pairs.logprobs(pairs.references)
    found: dict[str, Any] = {}
    for size in sizes:
        rows = [
            _moments(logp.exp(), logp - logq, score, size)
            for logp, logq, score in zip(logprobs, ref_logprobs, scores, strict=True)
        ]
        variances, plain, left_out = (torch.stack(column) for column in zip(*rows, strict=True))
        found[str(size)] = {
            "variance": rounded(variances, 6),
            "bias_without_baseline": rounded((plain - exact).norm(dim=1) / exact.norm(dim=1), 6),
            "bias": rounded((left_out - exact).norm(dim=1) / exact.norm(dim=1), 6),
        }
    return found


def completion_scores(pairs: TabularPairs) -> Tensor:
    """Gradient of every completion's log-probability in the policy's logits, shape [S, N, parameters]."""
    return torch.stack(
        [
            torch.autograd.functional.jacobian(lambda logits: pairs.logprobs(logits[None])[0], table).flatten(
                1
            )
            for table in pairs.policies
        ]
    )


def _moments(probabilities: Tensor, k1: Tensor, scores: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Relative variance of the mean of k1, and the expected gradients without and with leave-one-out."""
    cumulative = probabilities.cumsum(0)
    # As a function of the shift in [0, 1 / K), a completion changes where the shift meets a boundary
    ends = torch.cat([cumulative * size % 1, torch.tensor([0.0, 1.0])]).sort().values / size
    lengths, middles = ends.diff() * size, (ends[1:] + ends[:-1]) / 2
    places = middles[:, None] + torch.arange(size) / size
    chosen = torch.searchsorted(cumulative, places).clamp(max=len(k1) - 1)
    values = k1[chosen]  # [steps, K]
    mean = probabilities @ k1
    variance = lengths @ (values.mean(1) - mean).square()
    independent = probabilities @ (k1 - mean).square() / size
    others = (values.sum(1, keepdim=True) - values) / (size - 1)
    plain, left_out = (
        torch.einsum("s,sk,skp->p", lengths, weights / size, scores[chosen])
        for weights in (values, values - others)
    )
    return variance / independent, plain, left_out
