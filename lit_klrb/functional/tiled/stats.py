"""Differentiable token statistics from hidden states and heads."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_klrb.functional.logprobs import TokenStats
from lit_klrb.functional.tiled.blocks import RowStats, block_recomputed_gradient, fused
from lit_klrb.functional.tiled.head import HeadGradients
from lit_klrb.functional.tiled.problem import (
    Pair,
    Problem,
    positions_of,
    rows_of,
    unless_no_grad,
    weighted,
)
from lit_klrb.functional.tiled.tile import Tile


def tiled_token_stats(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    tile_size: int | None = None,
    mask: Tensor | None = None,
    logit_softcap: float | None = None,
    ref_logit_softcap: float | None = None,
    token_values: Tensor | None = None,
) -> TokenStats:
    """`token_stats` from hidden states, without [B, T, V] logits; values and gradients are the same.

    The logits are c(hidden · weightᵀ + bias), with c(x) = s tanh(x / s) for a soft cap s, divided by the
    temperature. They are computed one tile of rows and one block of columns at a time, in float32 (float64
    for float64 hidden states) regardless of the weights' dtype. Up to 2^25 logits (268 MB for both models)
    are retained for the backward pass. More are computed again, which makes six matrix products instead of
    four. If the weights of the loss are known in advance, `tiled_policy_loss` always needs only four.

    Args:
        hidden: Policy hidden states, shape [B, T, D]; position t predicts `tokens[:, t]`.
        weight: Policy head, shape [V, D].
        ref_hidden: Reference hidden states, shape [B, T, D']. No gradient flows to the reference.
        ref_weight: Reference head, shape [V, D'].
        tokens: Sampled token ids, shape [B, T].
        bias: Policy head bias, shape [V].
        ref_bias: Reference head bias, shape [V].
        temperature: The sampling temperature; the logits of both models are divided by it.
        tile_size: Rows (tokens) per tile.
        mask: True where statistics are computed, shape [B, T]; other positions have no influence, whatever
            they hold, and are 0 in the result. None computes all.
        logit_softcap: Soft cap of the policy's logits.
        ref_logit_softcap: Soft cap of the reference's logits.
        token_values: A value a(v) for every token, in units of reward, shape [V]; treated as constant.

    Returns:
        All fields, shape [B, T]; `value` and `expected_value` only if token values are given. If only the
        reference excludes a token, the KL is +inf and a warning names the token.

    Raises:
        ConfigurationError: If the shapes do not match, or temperature, tile size or a soft cap is not
            positive.

    Example:
        >>> hidden, tokens = torch.ones(1, 1, 1), torch.tensor([[0]])
        >>> coin, fair = torch.tensor([[0.7], [0.3]]).log(), torch.tensor([[0.5], [0.5]]).log()
        >>> stats = tiled_token_stats(hidden, coin, hidden, fair, tokens)
        >>> [round(field.item(), 4) for field in stats[:4]]
        [-0.3567, -0.6931, 0.0823, 0.6109]
    """
    policy = Pair(hidden, weight, bias, logit_softcap)
    reference = Pair(ref_hidden, ref_weight, ref_bias, ref_logit_softcap)
    problem = Problem.of(policy, reference, tokens, mask, temperature, tile_size, token_values)
    leaves = unless_no_grad(rows_of(hidden, mask), weight, bias)
    fields = _TiledTokenStats.apply(*leaves, problem)  # type: ignore[no-untyped-call]
    return TokenStats(*(positions_of(field, tokens, mask) for field in fields))


class _TiledTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = _tiles(problem) if problem.is_small and any(ctx.needs_input_grad) else None
            sums = _sums(problem) if tiles is None else torch.cat([tile.sums for tile in tiles], 1)
            stats = RowStats.of(sums)
            fields = problem.fields(stats, slice(None))
        problem.warn_infinite(stats.kl)
        # `problem` has what backward needs; saving them makes autograd detect changes made in between
        ctx.save_for_backward(hidden, weight, bias)
        ctx.problem, ctx.stats, ctx.tiles = problem, stats, tiles
        ctx.mark_non_differentiable(*fields[1:5:3])  # the reference's log-probability, the token's value
        ctx.set_materialize_grads(False)
        return fields

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, *_ = ctx.saved_tensors
        problem: Problem = ctx.problem
        # The retained blocks do not have the gradient of the entropy, and are overwritten when they are used
        tiles = ctx.tiles if upstream[3] is None else None
        ctx.tiles = None
        nothing = problem.inputs.new_zeros(len(problem.tokens))
        score, _, kl, entropy, *valued = (nothing if slope is None else slope for slope in upstream)
        gradients = HeadGradients(problem.policy, problem.inputs, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            if tiles is None:
                _recompute(problem, ctx.stats, (score, kl, entropy, *valued[1:]), gradients)
            else:
                for tile in tiles:
                    value = valued[1][tile.rows] if valued else None
                    tile.backpropagate(score[tile.rows], kl[tile.rows], value, gradients)
        return *gradients.finish(hidden.dtype), None


def _tiles(problem: Problem) -> list[Tile]:
    """All tiles, each in memory of its own."""
    return [Tile.of(problem, rows, problem.buffers(True, shared=False)) for rows in problem.tiles()]


def _sums(problem: Problem) -> Tensor:
    """`Tile.sums` of all rows in one pass over the heads: each block is applied to all tiles of rows."""
    buffers, sums = problem.buffers(retain_blocks=False), []
    for block in problem.policy.blocks():
        sums.append(torch.cat([problem.sums(rows, block, buffers) for rows in problem.tiles()]))
    return torch.stack(sums)


def _recompute(
    problem: Problem, stats: RowStats, upstream: tuple[Tensor, ...], gradients: HeadGradients
) -> None:
    """The backward pass from logits that are computed again.

    With p and q the softmaxes, H the entropy and a the token values, the upstream gradients of a row's
    log-probability, KL, entropy and expected value contribute to the gradient of its logits
    score (onehot - p),   kl p (log p - log q - KL),   -entropy p (log p + H),   value p (a - sum p a).
    """
    gradient_of = fused(block_recomputed_gradient, problem.inputs.device)
    policy, dtype = problem.policy, problem.inputs.dtype
    score, kl, entropy, *value = upstream
    constant = -score - weighted(kl, stats.kl) - weighted(entropy, stats.entropy)
    if stats.expected_value is not None:
        constant = constant - value[0] * stats.expected_value
    coefficients = torch.stack([constant.to(dtype), -kl, -entropy, *value], 1)
    normalisers = torch.stack([stats.normaliser, stats.ref_normaliser], 1).to(dtype)
    buffers = problem.buffers(retain_blocks=False)
    for block in policy.blocks():
        for rows in problem.tiles():
            logits, gradient, masses = problem.logits(rows, block, buffers)
            capped = None if policy.cap is None else logits.clone()
            values = problem.values_of(rows, block)
            gradient_of(logits, gradient, masses, normalisers[rows], coefficients[rows], *values)
            if capped is not None:
                gradient = policy.through_cap(gradient, capped)
            gradients.add(gradient, buffers.precise(policy.weight[block]), rows, block)
    gradients.add_tokens(score, problem.tokens, slice(None))
