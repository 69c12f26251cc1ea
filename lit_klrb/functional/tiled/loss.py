"""The policy loss used in training: with the weights known, gradients are computed in the forward pass."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.checks import check_shape, positions_of, rows_of
from lit_klrb.functional.credit import weighted
from lit_klrb.functional.logprobs import TokenStats, TopK
from lit_klrb.functional.surrogate import ClipRange, check_clip_range, clipped_loss, weighted_loss
from lit_klrb.functional.tiled.buffers import Buffers
from lit_klrb.functional.tiled.head import HeadGradients
from lit_klrb.functional.tiled.inputs import Pair, TiledInputs, unless_no_grad
from lit_klrb.functional.tiled.tile import Tile
from lit_klrb.functional.topk import kl_known, kl_topk


def tiled_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    tokens: Tensor,
    mask: Tensor,
    score_weights: Tensor,
    kl_weights: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    tile_size: int | None = None,
    behaviour_logprobs: Tensor | None = None,
    clip_range: ClipRange | None = None,
    logit_softcap: float | None = None,
    ref_logit_softcap: float | None = None,
    token_values: Tensor | None = None,
    value_weights: Tensor | None = None,
    topk: TopK | None = None,
    jsd_weight: float | None = None,
) -> tuple[Tensor, TokenStats]:
    """Sum over masked tokens of `score_weights · s + kl_weights · kl`, divided by B.

    Token values add a third term, `value_weights · expected_value`. With `topk`, `kl_topk` takes the place of
    the exact KL, and the reference's logits are not retained for the gradient: they are needed at the head.
    With `jsd_weight`, the Jensen-Shannon divergence takes its place; a weight of 1 gives the forward KL.

    s is the log-probability or, with `behaviour_logprobs`, the ratio to the behaviour policy, clipped as in
    PPO if `clip_range` is given. All weights are constants. The gradients of hidden states, weight and bias
    can therefore be computed tile by tile in the forward pass, with four matrix products and without [B, T,
    V] logits. The backward pass only scales and returns them, so it can run once.

    Args:
        hidden: Policy hidden states, shape [B, T, D]; position t predicts `tokens[:, t]`.
        weight: Policy head, shape [V, D].
        ref_hidden: Reference hidden states, shape [B, T, D']. No gradient flows to the reference.
        ref_weight: Reference head, shape [V, D'].
        tokens: Sampled token ids, shape [B, T].
        mask: True on completion tokens, shape [B, T]; other positions are not computed and have no influence,
            whatever they hold.
        score_weights: Weights of s (minus the advantages), shape [B, T].
        kl_weights: Weights of the per-token KL, exact or `kl_topk`, shape [B, T]; weight 0 removes even an
            infinite KL.
        bias: Policy head bias, shape [V].
        ref_bias: Reference head bias, shape [V].
        temperature: The sampling temperature; the logits of both models are divided by it.
        tile_size: Rows (tokens) per tile; the logits of two tiles are held in memory.
        behaviour_logprobs: Log-probabilities under the policy that sampled the tokens, shape [B, T].
        clip_range: The range within which the ratio is not clipped, see `clipped_loss`.
        logit_softcap: Soft cap of the policy's logits.
        ref_logit_softcap: Soft cap of the reference's logits.
        token_values: Values a(v) of the tokens, in units of reward, shape [V]; treated as constant. Tokens
            beyond a shorter table have the value 0.
        value_weights: Weights of the expected token value sum_v p(v) a(v), shape [B, T].
        topk: The head of `kl_topk`; None for the exact KL.
        jsd_weight: Weight of the Jensen-Shannon divergence as in `token_stats`; None for the exact KL.

    Returns:
        The scalar loss and all statistics, detached, shape [B, T], 0 outside the mask; `value` and
        `expected_value` only if token values are given, the sums over the head only with `topk`, and `jsd`
        only with its weight. If only the reference excludes a token, the KL is +inf and a warning names the
        token.

    Raises:
        ConfigurationError: If the shapes do not match, if a token inside the mask is not in the vocabulary,
            if temperature, tile size, clip range or a soft cap is not positive, if k or the divergence's
            weight is out of range or both are given, if a clip range is given without a behaviour policy, or
            if only one of token values and their weights is given.

    Example:
        >>> hidden, tokens, ones = torch.ones(1, 1, 1), torch.tensor([[0]]), torch.ones(1, 1)
        >>> coin, fair = torch.tensor([[0.7], [0.3]]).log(), torch.tensor([[0.5], [0.5]]).log()
        >>> head = coin.requires_grad_()
        >>> loss, stats = tiled_policy_loss(hidden, head, hidden, fair, tokens, ones > 0, 2 * ones, ones)
        >>> loss.backward()
        >>> round(loss.item(), 4), [round(value, 4) for value in head.grad.flatten().tolist()]
        (-0.6311, [0.7779, -0.7779])
    """
    weights = {"score_weights": score_weights, "kl_weights": kl_weights, "value_weights": value_weights}
    for name, values in (weights | {"behaviour_logprobs": behaviour_logprobs}).items():
        check_shape(name, values, tuple(tokens.shape))
    if clip_range is not None:
        check_clip_range(clip_range)
        if behaviour_logprobs is None:
            problem = f"must be None without behaviour_logprobs, got {clip_range}"
            raise ConfigurationError(problem, key="clip_range")
    if (token_values is None) != (value_weights is None):
        raise ConfigurationError("must be given together with token_values", key="value_weights")
    policy = Pair(hidden, weight, bias, logit_softcap)
    reference = Pair(ref_hidden, ref_weight, ref_bias, ref_logit_softcap)
    settings = temperature, tile_size, token_values, topk, jsd_weight
    tiled = TiledInputs.of(policy, reference, tokens, mask, *settings)
    sequences, inside = max(len(tokens), 1), tiled.mask
    behaviour = None if behaviour_logprobs is None else rows_of(behaviour_logprobs, inside)
    objective = _Objective(
        rows_of(score_weights.detach(), inside) / sequences,
        rows_of(kl_weights.detach(), inside) / sequences,
        None if value_weights is None else rows_of(value_weights.detach(), inside) / sequences,
        behaviour,
        math.inf if clip_range is None else clip_range,
    )
    leaves, names = unless_no_grad(rows_of(hidden, inside), weight, bias), list[str]()
    apply: Any = _TiledPolicyLoss.apply
    loss, *fields = apply(*leaves, tiled, objective, names)
    spread = (positions_of(field, tokens, inside) for field in fields)
    stats = TokenStats(**dict(zip(names, spread, strict=True)))
    return loss, stats._replace(jsd=stats.kl) if jsd_weight == 0 else stats


class _Objective(NamedTuple):
    """Weights of the rows inside the mask, divided by B, shape [N]."""

    score_weights: Tensor
    kl_weights: Tensor
    value_weights: Tensor | None
    behaviour_logprobs: Tensor | None
    clip_range: ClipRange

    def of(self, stats: TokenStats, rows: slice) -> Tensor:
        """The sum over a tile, differentiable in its statistics, shape [N]."""
        dtype = stats.logprobs.dtype
        weights = self.score_weights[rows].to(dtype)[None]
        if self.behaviour_logprobs is None:
            loss = weighted_loss(stats.logprobs[None], weights)
        else:
            log_ratio = stats.logprobs - self.behaviour_logprobs[rows]
            loss = clipped_loss(log_ratio[None], weights, self.clip_range)
        divergence = kl_known(stats) if stats.head_kl is None else kl_topk(stats)
        if stats.jsd is not None:
            divergence = stats.jsd
        loss = loss + weighted(self.kl_weights[rows].to(dtype), divergence).sum()
        if self.value_weights is None or stats.expected_value is None:
            return loss
        return loss + (self.value_weights[rows].to(dtype) * stats.expected_value).sum()


class _TiledPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tiled: TiledInputs,
        objective: _Objective,
        names: list[str],
    ) -> tuple[Tensor, ...]:
        """The loss and the fields of the statistics, whose names are appended to `names`."""
        gradients = HeadGradients(tiled.policy, tiled.inputs, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            buffers = tiled.buffers(retain_blocks=True)  # shared by all tiles
            parts = [_tile(tiled, objective, rows, gradients, buffers) for rows in tiled.tiles()]
        losses, tiles = zip(*parts, strict=True)
        names.extend(tiles[0])
        statistics = tuple(torch.cat([fields[name] for fields in tiles]) for name in names)
        tiled.warn_infinite(statistics[names.index("kl")])
        ctx.gradients = gradients.finish(hidden.dtype)
        ctx.mark_non_differentiable(*statistics)
        return torch.stack(losses).sum(), *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            problem = "tiled_policy_loss returns its gradients once"
            raise RuntimeError(f"{problem}: compute the loss again for a second backward")
        if bool(upstream != 1):
            gradients = tuple(None if g is None else g.mul_(upstream) for g in gradients)
        return *gradients, None, None, None


def _tile(
    tiled: TiledInputs, objective: _Objective, rows: slice, gradients: HeadGradients, buffers: Buffers
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and statistics of a tile; its logits are computed once, for both values and gradients."""
    tile = Tile.of(tiled, rows, buffers)
    fields = tile.fields()
    # By autograd of a function of N statistics: the loss is defined once, and its gradient follows
    with torch.enable_grad():
        leaves = {name: field.detach().requires_grad_() for name, field in fields.items()}
        loss = objective.of(TokenStats(**leaves), rows)
    if gradients.needed:
        slopes = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
        tile.backpropagate({n: s for n, s in zip(leaves, slopes, strict=True) if s is not None}, gradients)
    return loss.detach(), fields
