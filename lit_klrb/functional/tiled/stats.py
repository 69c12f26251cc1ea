"""Differentiable token statistics from hidden states and heads."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_klrb.functional.checks import positions_of, rows_of
from lit_klrb.functional.credit import weighted
from lit_klrb.functional.logprobs import TokenStats, TopK
from lit_klrb.functional.tiled.blocks import RowStats, block_recomputed_gradient, fused
from lit_klrb.functional.tiled.head import HeadGradients
from lit_klrb.functional.tiled.inputs import Pair, TiledInputs, defined, may_be_retained, unless_no_grad
from lit_klrb.functional.tiled.tile import Tile
from lit_klrb.functional.tiled.topk import TopKRows


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
    topk: TopK | None = None,
    jsd_weight: float | None = None,
) -> TokenStats:
    """`token_stats` from hidden states, without [B, T, V] logits; values and gradients are the same.

    The logits are c(hidden · weightᵀ + bias), with c(x) = s tanh(x / s) for a soft cap s, divided by the
    temperature. They are computed one tile of rows and one block of columns at a time, in float32 (float64
    for float64 hidden states) regardless of the weights' dtype. Up to 2^26 logits (537 MB for both models)
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
            they hold, and are 0 in the result. None computes all whose token is not -100.
        logit_softcap: Soft cap of the policy's logits.
        ref_logit_softcap: Soft cap of the reference's logits.
        token_values: Values a(v) of the tokens, in units of reward, shape [V]; treated as constant. Tokens
            beyond a shorter table have the value 0.
        topk: The head for which sums are computed. Which tokens it has is not differentiated.
        jsd_weight: As in `token_stats`.

    Returns:
        All fields, shape [B, T]; `value` and `expected_value` only if token values are given, the sums over
        the head only with `topk`, and `jsd` only with its weight. If only the reference excludes a token, the
        KL is +inf and a warning names the token.

    Raises:
        ConfigurationError: If the shapes do not match, a token inside the mask is not in the vocabulary,
            temperature, tile size or a soft cap is not positive, k or the weight is out of range, or both are
            given.

    Example:
        >>> hidden, tokens = torch.ones(1, 1, 1), torch.tensor([[0]])
        >>> coin, fair = torch.tensor([[0.7], [0.3]]).log(), torch.tensor([[0.5], [0.5]]).log()
        >>> stats = tiled_token_stats(hidden, coin, hidden, fair, tokens)
        >>> [round(field.item(), 4) for field in stats[:4]]
        [-0.3567, -0.6931, 0.0823, 0.6109]
    """
    policy = Pair(hidden, weight, bias, logit_softcap)
    reference = Pair(ref_hidden, ref_weight, ref_bias, ref_logit_softcap)
    settings = temperature, tile_size, token_values, topk, jsd_weight
    tiled = TiledInputs.of(policy, reference, tokens, mask, *settings)
    mask = tiled.mask
    leaves, names = unless_no_grad(rows_of(hidden, mask), weight, bias), list[str]()
    fields = _TiledTokenStats.apply(*leaves, tiled, names)  # type: ignore[no-untyped-call]
    spread = (positions_of(field, tokens, mask) for field in fields)
    stats = TokenStats(**dict(zip(names, spread, strict=True)))
    return stats._replace(jsd=stats.kl) if jsd_weight == 0 else stats


# Fields without a gradient in the policy
_CONSTANT = {"ref_logprobs", "value", "ref_head_mass", "in_head"}


class _TiledTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tiled: TiledInputs, names: list[str]
    ) -> tuple[Tensor, ...]:
        """The fields; their names are appended to `names`."""
        with torch.autocast(hidden.device.type, enabled=False):
            is_small = may_be_retained(len(tiled.tokens), len(weight))
            tiles = None
            if is_small and any(ctx.needs_input_grad):  # each in memory of its own
                tiles = [Tile.of(tiled, rows, tiled.buffers(True, shared=False)) for rows in tiled.tiles()]
            stats, heads = _row_stats(tiled) if tiles is None else _joined(tiles)
            fields = tiled.fields(stats, heads, slice(None))
        tiled.warn_infinite(stats.kl)
        names.extend(fields)
        # `tiled` has what backward needs; saving them makes autograd detect changes made in between
        ctx.save_for_backward(hidden, weight, bias, *tiled.constants)
        ctx.tiled, ctx.stats, ctx.heads, ctx.tiles, ctx.names = tiled, stats, heads, tiles, names
        ctx.mark_non_differentiable(*(field for name, field in fields.items() if name in _CONSTANT))
        ctx.set_materialize_grads(False)
        return tuple(fields.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, *_ = ctx.saved_tensors
        tiled: TiledInputs = ctx.tiled
        slopes = {name: slope for name, slope in zip(ctx.names, upstream, strict=True) if slope is not None}
        if tiled.jsd_weight == 1 and "forward_kl" in slopes:  # the same number under two names
            slopes["jsd"] = slopes.pop("forward_kl") + slopes.get("jsd", 0)
        # The retained blocks do not have the gradients of entropy and forward KL, nor with a head or another
        # divergence that of the exact KL, and are overwritten when they are used
        missing = {"entropy", "forward_kl"}
        missing |= set() if tiled.topk is None and tiled.jsd_weight is None else {"kl"}
        tiles, ctx.tiles = None if missing & set(slopes) else ctx.tiles, None
        gradients = HeadGradients(tiled.policy, tiled.inputs, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            if tiles is None:
                _recompute(tiled, ctx.stats, ctx.heads, slopes, gradients)
            else:
                for tile in tiles:
                    tile.backpropagate({name: s[tile.rows] for name, s in slopes.items()}, gradients)
        return *gradients.finish(hidden.dtype), None, None


def _joined(tiles: list[Tile]) -> tuple[RowStats, TopKRows | None]:
    """Statistics and heads of the rows of all tiles."""
    stats = RowStats.of(torch.cat([tile.sums for tile in tiles], 1))
    if all(tile.stats.jsd is not None for tile in tiles):
        jsd, slope = (torch.cat([getattr(t.stats, n) for t in tiles]) for n in ("jsd", "jsd_slope"))
        stats = stats._replace(jsd=jsd, jsd_slope=slope)
    heads = [tile.heads for tile in tiles if tile.heads is not None]
    return stats, TopKRows.joined(heads) if heads else None


def _row_stats(tiled: TiledInputs) -> tuple[RowStats, TopKRows | None]:
    """`_joined` in one pass over the heads, each block of which is applied to all tiles of rows."""
    if tiled.jsd_weight is not None:  # tile by tile, as all blocks of a tile are read again
        buffers = tiled.buffers(retain_blocks=True)
        return _joined([Tile.of(tiled, rows, buffers) for rows in tiled.tiles()])
    buffers, sums, candidacy = tiled.buffers(retain_blocks=False), [], tiled.candidacy()
    for block in tiled.policy.blocks():
        sums.append(torch.cat([tiled.sums(rows, block, buffers, candidacy) for rows in tiled.tiles()]))
    stats = RowStats.of(torch.stack(sums))
    return stats, None if candidacy is None else candidacy.heads(stats)


def _recompute(
    tiled: TiledInputs,
    stats: RowStats,
    heads: TopKRows | None,
    slopes: dict[str, Tensor],
    gradients: HeadGradients,
) -> None:
    """The backward pass from logits that are computed again.

    With p and q the softmaxes, H the entropy and a the token values, the upstream gradients of a row's
    log-probability, KL, entropy, forward KL and expected value contribute to the gradient of its logits
    score (onehot - p),   kl p (log p - log q - KL),   -entropy p (log p + H),   forward (p - q),
    value p (a - sum p a).
    For those of the sums over the head see `TopKRows.gradient`, for that of the JSD `block_jsd`.
    """
    gradient_of = fused(block_recomputed_gradient, tiled.inputs.device)
    policy, dtype = tiled.policy, tiled.inputs.dtype
    nothing = tiled.inputs.new_zeros(len(tiled.tokens))
    names = "logprobs", "kl", "entropy", "forward_kl"
    score, kl, entropy, forward = (slopes.get(name, nothing) for name in names)
    kl, forward = defined(kl, stats.kl), defined(forward, stats.forward_kl)
    value = [] if stats.expected_value is None else [slopes.get("expected_value", nothing)]
    # What multiplies p alone; `weighted`, as a weight of 0 must remove an infinite KL
    constant = forward - score - weighted(kl, stats.kl) - weighted(entropy, stats.entropy)
    if stats.expected_value is not None:
        constant = constant - value[0] * stats.expected_value
    jsd = defined(slopes["jsd"], stats.jsd) if "jsd" in slopes and stats.jsd is not None else None
    if jsd is not None and stats.jsd_slope is not None:
        constant = constant - weighted(jsd, stats.jsd_slope)
    at_head = None
    if heads is not None:
        of_head = slopes.get("head_kl", nothing), slopes.get("head_mass"), slopes.get("head_forward_kl")
        at_all, at_head = heads.gradient(*of_head)
        constant = constant + at_all
    coefficients = torch.stack([constant.to(dtype), -kl, -entropy, -forward, *value], 1)
    normalisers = torch.stack([stats.normaliser, stats.ref_normaliser], 1).to(dtype)
    buffers = tiled.buffers(retain_blocks=False)
    # Blocks outside, tiles inside: each block of the head is read once
    for block in policy.blocks():
        for rows in tiled.tiles():
            logits, gradient, masses = tiled.logits(rows, block, buffers)
            capped = None if policy.cap is None else logits.clone()
            jsd_part = None
            if jsd is not None:
                jsd_part = tiled.jsd_products(logits.clone(), gradient.clone(), normalisers[rows])[0]
            values = tiled.values_of(rows, block)
            gradient_of(logits, gradient, masses, normalisers[rows], coefficients[rows], *values)
            if jsd is not None and jsd_part is not None:
                gradient.addcmul_(jsd[rows, None], jsd_part)
            if heads is not None and at_head is not None:
                heads.rows(rows).scatter(at_head[rows], gradient, block)
            if capped is not None:
                gradient = policy.through_cap(gradient, capped)
            gradients.add(gradient, buffers.precise(policy.weight[block]), rows, block)
    gradients.add_tokens(score, tiled.tokens, slice(None))
