"""Differentiable log-probabilities of one model from hidden states and head, without [B, T, V] logits."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_klrb.errors import check_positive
from lit_klrb.functional.checks import check_mask, check_shape, inside_mask, positions_of, rows_of
from lit_klrb.functional.products import linear
from lit_klrb.functional.tiled.blocks import block_masses, block_probabilities, fused
from lit_klrb.functional.tiled.buffers import take
from lit_klrb.functional.tiled.head import Head, HeadGradients
from lit_klrb.functional.tiled.inputs import default_tile_size, may_be_retained, tiles_of, unless_no_grad

# So many logits (4 MB) are computed at once: tiles took 1.2 times as long for 3,072 tokens and V = 239, but
# not for V = 2,048 (`python -m benchmarks logprobs`).
_AT_ONCE = 2**20


def tiled_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    tile_size: int | None = None,
    mask: Tensor | None = None,
    logit_softcap: float | None = None,
) -> Tensor:
    """Log-probabilities of `tokens`, for losses without a reference such as those of DPO and SFT.

    Computed as in `tiled_token_stats`: up to 2^26 logits (268 MB) are retained for the backward pass, which
    makes three matrix products; more are computed again, which makes four. At most 2^20 are computed at once.

    Args:
        hidden: Hidden states, shape [B, T, D]; position t predicts `tokens[:, t]`.
        weight: Head, shape [V, D].
        tokens: Token ids, one or n at each position, shape [B, T] or [B, T, n].
        bias: Head bias, shape [V].
        temperature: The logits are divided by it.
        tile_size: Rows (tokens) per tile.
        mask: True where log-probabilities are computed, shape [B, T]; other positions have no influence,
            whatever they hold, and are 0 in the result. None computes all tokens but -100, whose result is 0.
        logit_softcap: Soft cap of the logits.

    Returns:
        Log-probabilities in float32, or in float64 for float64 hidden states, in the shape of the tokens.

    Raises:
        ConfigurationError: If the shapes do not match, a token inside the mask is not in the vocabulary, or a
            number is not positive.

    Example:
        >>> hidden, coin = torch.ones(1, 2, 1), torch.tensor([[0.7], [0.3]]).log()
        >>> logprobs = tiled_logprobs(hidden, coin.requires_grad_(), torch.tensor([[0, 1]]))
        >>> [round(value, 4) for value in logprobs.exp().flatten().tolist()]
        [0.7, 0.3]
        >>> logprobs.sum().backward()
        >>> [round(value, 4) for value in coin.grad.flatten().tolist()]
        [-0.4, 0.4]
    """
    check_positive(temperature=temperature, tile_size=tile_size, logit_softcap=logit_softcap)
    positions = tuple(tokens.shape[:2])
    check_shape("hidden", hidden, (*positions, weight.shape[-1]))
    check_shape("bias", bias, (len(weight),))
    several, counted = tokens if tokens.ndim == 3 else tokens.unsqueeze(-1), None
    if mask is not None:
        check_mask(mask, positions)
        inside_mask(several, mask, len(weight))
    elif (counted := inside_mask(several, None, len(weight))) is not None:
        mask, several = counted.any(-1), several.masked_fill(~counted, 0)
    head = Head.of(weight, bias, temperature, logit_softcap)
    inputs = head.inputs(rows_of(hidden, mask))
    tile_size = tile_size or default_tile_size(len(weight))
    rows = _Rows(head, inputs, rows_of(several, mask).long(), tile_size)
    if len(rows.tokens) * len(weight) <= _AT_ONCE:
        logprobs = rows.from_all_logits(rows_of(hidden, mask), weight, bias)
    else:
        leaves = unless_no_grad(rows_of(hidden, mask), weight, bias)
        logprobs = _TiledLogprobs.apply(*leaves, rows)  # type: ignore[no-untyped-call]
    logprobs = positions_of(logprobs, several, mask)
    return (logprobs if counted is None else torch.where(counted, logprobs, 0)).view_as(tokens)


class _Rows(NamedTuple):
    """A head with its scaled inputs, [N, D], and tokens, [N, n]."""

    head: Head
    inputs: Tensor
    tokens: Tensor
    tile_size: int

    def from_all_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The log-probabilities by autograd, from all logits at once."""
        head, dtype = self.head, self.inputs.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if bias is None else head.scale * bias.to(dtype)
            z = linear(head.scale * hidden.to(dtype), weight.to(dtype), bias)
            logits = z if head.cap is None else head.cap * z.tanh()
            return logits.log_softmax(-1).gather(-1, self.tokens)

    def logits(self, rows: slice, retain: bool) -> Iterator[Tensor]:
        """The logits of a tile, one block at a time; overwritten by the next unless they are retained."""
        count = rows.stop - rows.start
        for block in self.head.blocks():
            shape = count, block.stop - block.start
            size = math.prod(shape)
            memory = self.inputs.new_empty(size) if retain else take("logits", self.inputs, size)
            weight = self.head.weight[block].to(self.inputs.dtype)
            yield self.head.logits(self.inputs[rows], weight, block, memory.view(shape))

    def normaliser(self, tops_and_masses: list[Tensor]) -> Tensor:
        """The log normaliser of each row, in float64, from the results of `block_masses`."""
        top, mass = torch.stack(tops_and_masses).double().unbind(2)
        return (top + mass.log()).logsumexp(0)

    def backpropagate(
        self,
        rows: slice,
        logits: Iterator[Tensor] | list[Tensor],
        normaliser: Tensor,
        slopes: Tensor,
        gradients: HeadGradients,
    ) -> None:
        """Add the gradient of a tile, slope (onehot - p) in the logits for each token; overwrites them."""
        head, gradient_of = self.head, fused(block_probabilities, self.inputs.device)
        total = slopes.sum(1)
        for block, values in zip(head.blocks(), logits, strict=True):
            capped = None if head.cap is None else values.clone()
            # -slope p now; `add_tokens` adds the slope at the token
            gradient_of(values, torch.stack([normaliser.to(total.dtype), -total], 1))
            gradient = values if capped is None else head.through_cap(values, capped)
            gradients.add(gradient, head.weight[block].to(self.inputs.dtype), rows, block)
        for slope, tokens in zip(slopes.unbind(1), self.tokens[rows].unbind(1), strict=True):
            gradients.add_tokens(slope.contiguous(), tokens, rows)


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: _Rows) -> Tensor:
        count, vocabulary = len(rows.tokens), len(weight)
        retain = any(ctx.needs_input_grad) and may_be_retained(count, vocabulary)
        masses_of, tiles, normalisers = fused(block_masses, hidden.device), [], []
        with torch.autocast(hidden.device.type, enabled=False):
            for tile in tiles_of(count, rows.tile_size):
                kept, masses = [], []
                for logits in rows.logits(tile, retain):
                    masses.append(masses_of(logits))
                    kept += [logits] if retain else []
                normalisers.append(rows.normaliser(masses))
                tiles.append(kept)
            columns = [rows.head.token_logits(rows.inputs, tokens) for tokens in rows.tokens.unbind(1)]
        # `rows` has what backward needs; saving them makes autograd detect changes made in between
        ctx.save_for_backward(hidden, weight, bias, rows.tokens)
        ctx.rows, ctx.normalisers, ctx.tiles = rows, normalisers, tiles if retain else None
        return (torch.stack(columns, 1) - torch.cat(normalisers)[:, None]).to(rows.inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *_ = ctx.saved_tensors
        rows: _Rows = ctx.rows
        tiles, ctx.tiles = ctx.tiles, None  # overwritten when they are used
        gradients = HeadGradients(rows.head, rows.inputs, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for index, tile in enumerate(tiles_of(len(rows.tokens), rows.tile_size)):
                logits = rows.logits(tile, False) if tiles is None else tiles[index]
                rows.backpropagate(tile, logits, ctx.normalisers[index], slopes[tile], gradients)
        return *gradients.finish(hidden.dtype), None
