"""What both tiled operations take: the checked arguments, and the rows that are worth computing."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.logprobs import check_token_values, warn_infinite_kl
from lit_klrb.functional.tiled.blocks import Buffers, RowStats, block_sums, fused
from lit_klrb.functional.tiled.head import Head

# Fewer rows make the products with the head's 154 MB (GPT-2) slower, more only take memory.
_TILE_SIZE = 512


class Pair(NamedTuple):
    """A head with hidden states to apply it to: what gives one model's logits."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None


class Problem(NamedTuple):
    """Heads of policy and reference, and their scaled hidden states [N, D] of the same N tokens."""

    policy: Head
    reference: Head
    inputs: Tensor
    ref_inputs: Tensor
    tokens: Tensor
    tile_size: int
    token_values: Tensor | None

    @staticmethod
    def of(
        policy: Pair,
        reference: Pair,
        tokens: Tensor,
        mask: Tensor | None,
        temperature: float,
        tile_size: int | None,
        token_values: Tensor | None,
    ) -> "Problem":
        """The problem that an operation's arguments pose, checked.

        Raises:
            ConfigurationError: If the shapes do not fit, or a number is not positive.
        """
        check_positive(temperature=temperature, tile_size=tile_size)
        check_shape("mask", mask, tuple(tokens.shape))
        check_token_values(token_values, len(policy.weight))
        for prefix, pair in (("", policy), ("ref_", reference)):
            check_positive(**{f"{prefix}logit_softcap": pair.softcap})
            check_shape(f"{prefix}hidden", pair.hidden, (*tokens.shape, pair.weight.shape[-1]))
            check_shape(f"{prefix}weight", pair.weight, (len(policy.weight), pair.hidden.shape[-1]))
            check_shape(f"{prefix}bias", pair.bias, (len(policy.weight),))
        head, ref_head = (Head.of(p.weight, p.bias, temperature, p.softcap) for p in (policy, reference))
        inputs = head.inputs(rows_of(policy.hidden, mask))
        ref_inputs = ref_head.inputs(rows_of(reference.hidden, mask)).to(inputs.dtype)
        values = None if token_values is None else token_values.detach().to(inputs)
        rows = rows_of(tokens, mask)
        return Problem(head, ref_head, inputs, ref_inputs, rows, tile_size or _TILE_SIZE, values)

    def tiles(self) -> Iterator[slice]:
        """The rows, a tile at a time; one empty tile if there are none."""
        count = len(self.tokens)
        for start in range(0, max(count, 1), self.tile_size):
            yield slice(start, min(start + self.tile_size, count))

    def buffers(self, keep: bool) -> Buffers:
        """Memory for a tile's blocks; what is kept of them is kept for the whole vocabulary."""
        rows = min(self.tile_size, len(self.tokens))
        blocks = self.policy.blocks()
        return Buffers(self.inputs, rows, blocks[0].stop, kept=blocks[-1].stop if keep else None)

    def logits(self, rows: slice, block: slice, buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of a tile and a block by policy and reference, and room for their masses, in the buffers."""
        logits, ref_logits, masses = buffers.block(rows.stop - rows.start, block)
        for head, inputs, out in (
            (self.policy, self.inputs, logits),
            (self.reference, self.ref_inputs, ref_logits),
        ):
            head.logits(inputs[rows], buffers.precise(head.weight[block]), block, out)
        return logits, ref_logits, masses

    def sums(self, rows: slice, block: slice, buffers: Buffers) -> Tensor:
        """What `block_sums` leaves and returns for a tile and a block; with token values [rows, 7].

        The seventh sum is that of exp(v) a(v), a the token values.
        """
        logits, ref_logits, masses = self.logits(rows, block, buffers)
        sums = fused(block_sums, self.inputs.device)(logits, ref_logits, masses)
        if self.token_values is None:
            return sums
        return torch.cat([sums, (masses @ self.token_values[block]).unsqueeze(1)], 1)

    def values_of(self, rows: slice, block: slice) -> list[Tensor]:
        """The token values as the gradient's body takes them, [rows, block] in no memory of their own."""
        if self.token_values is None:
            return []
        return [self.token_values[block].expand(rows.stop - rows.start, -1)]

    def fields(self, stats: RowStats, rows: slice) -> tuple[Tensor, ...]:
        """The fields of `TokenStats` for a tile, [rows], in the precision of the inputs."""
        tokens, dtype = self.tokens[rows], self.inputs.dtype
        logprobs = self.policy.token_logits(self.inputs[rows], tokens) - stats.normaliser
        ref_logprobs = self.reference.token_logits(self.ref_inputs[rows], tokens) - stats.ref_normaliser
        fields = [logprobs, ref_logprobs, stats.kl, stats.entropy]
        if self.token_values is not None and stats.expected_value is not None:
            fields += [self.token_values[tokens], stats.expected_value]
        return tuple(field.to(dtype) for field in fields)

    def warn_infinite(self, kl: Tensor) -> None:
        """If a row's KL is infinite, name a token that the policy gives mass to and the reference none."""
        buffers = self.buffers(keep=False)
        for row in (kl == torch.inf).nonzero()[:1].flatten().tolist():
            for block in self.policy.blocks():
                logits, ref_logits, _ = self.logits(slice(row, row + 1), block, buffers)
                outside = (logits[0] > -torch.inf) & (ref_logits[0] == -torch.inf)
                if bool(outside.any()):
                    warn_infinite_kl(block.start + int(outside.nonzero()[0]))
                    return


def rows_of(values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, ...] to the rows inside the mask, [N, ...]; gradients outside it are zero."""
    return values.flatten(0, 1) if mask is None else values[mask]


def positions_of(rows: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """[N] back to [B, T], 0 outside the mask."""
    return rows.view_as(tokens) if mask is None else rows.new_zeros(tokens.shape).masked_scatter(mask, rows)


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Their product, 0 where the weight is, even if the value is infinite."""
    return torch.where(weights == 0, 0, weights * values)


def check_positive(**values: float | None) -> None:
    """Refuse numbers that are not positive; None is absent.

    Raises:
        ConfigurationError: Naming the first of them.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigurationError(f"{name} is {value}; a number > 0 expected")


def check_shape(name: str, value: Tensor | None, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape; None is absent.

    Raises:
        ConfigurationError: Naming it.
    """
    if value is not None and tuple(value.shape) != shape:
        raise ConfigurationError(f"{name} has shape {list(value.shape)}; {list(shape)} expected")
