"""The inputs of both tiled operations, checked and restricted to the rows inside the mask."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import check_positive
from lit_klrb.functional.checks import check_mask, check_shape, inside_mask, rows_of
from lit_klrb.functional.logprobs import TopK, check_heads, full_token_values, warn_infinite_kl
from lit_klrb.functional.tiled.blocks import RowStats, block_sums, fused
from lit_klrb.functional.tiled.buffers import Buffers, take
from lit_klrb.functional.tiled.head import Head
from lit_klrb.functional.tiled.jsd import block_forward, block_jsd
from lit_klrb.functional.tiled.topk import Candidacy, TopKRows

# Smaller tiles make products with the head (154 MB for GPT-2) slower, larger ones only need more memory.
_TILE_SIZE = 512
# With a vocabulary of 152k, 256 rows need 315 MB less than 512 and 5 % more time.
_SMALL_TILE_SIZE = 256
# Logits that are retained between the forward and the backward pass: 2 * 4 bytes each, 537 MB.
_RETAINED_LOGITS = 2**26


class Pair(NamedTuple):
    """The hidden states and head weights of one model."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None


class TiledInputs(NamedTuple):
    """Heads of policy and reference with their scaled hidden states, [N, D] and [N, D'], for N tokens.

    `mask` is the mask of those tokens, [B, T]; None if they are all.
    """

    mask: Tensor | None
    policy: Head
    reference: Head
    inputs: Tensor
    ref_inputs: Tensor
    tokens: Tensor
    tile_size: int
    token_values: Tensor | None
    topk: TopK | None
    jsd_weight: float | None  # None also for 0, at which the divergence is the KL

    @staticmethod
    def of(
        policy: Pair,
        reference: Pair,
        tokens: Tensor,
        mask: Tensor | None,
        temperature: float,
        tile_size: int | None,
        token_values: Tensor | None,
        topk: TopK | None,
        jsd_weight: float | None,
    ) -> "TiledInputs":
        """Check the arguments of a tiled operation and select the rows inside the mask."""
        check_positive(temperature=temperature, tile_size=tile_size)
        if mask is not None:
            check_mask(mask, tuple(tokens.shape))
        mask = inside_mask(tokens, mask, len(policy.weight))
        check_heads(topk, jsd_weight, len(policy.weight))
        for prefix, pair in (("", policy), ("ref_", reference)):
            check_positive(**{f"{prefix}logit_softcap": pair.softcap})
            check_shape(f"{prefix}hidden", pair.hidden, (*tokens.shape, pair.weight.shape[-1]))
            check_shape(f"{prefix}weight", pair.weight, (len(policy.weight), pair.hidden.shape[-1]))
            check_shape(f"{prefix}bias", pair.bias, (len(policy.weight),))
        head, ref_head = (Head.of(p.weight, p.bias, temperature, p.softcap) for p in (policy, reference))
        inputs = head.inputs(rows_of(policy.hidden, mask))
        ref_inputs = ref_head.inputs(rows_of(reference.hidden, mask)).to(inputs.dtype)
        values = full_token_values(token_values, len(policy.weight), like=inputs)
        rows = rows_of(tokens, mask).long()
        tile_size = tile_size or default_tile_size(len(policy.weight))
        settings = tile_size, values, topk, jsd_weight or None
        return TiledInputs(mask, head, ref_head, inputs, ref_inputs, rows, *settings)

    @property
    def constants(self) -> tuple[Tensor | None, ...]:
        """What a backward pass needs beside the policy: saved, autograd detects changes in between."""
        return self.reference.weight, self.reference.bias, self.tokens, self.token_values

    def tiles(self) -> Iterator[slice]:
        """Slices of the rows, one per tile."""
        return tiles_of(len(self.tokens), self.tile_size)

    def buffers(self, retain_blocks: bool, shared: bool = True) -> Buffers:
        """Memory for one block of a tile or, if blocks are retained, for the whole vocabulary.

        With `topk`, the reference's logits are never retained: they are needed at the head only.
        """
        rows = min(self.tile_size, len(self.tokens))
        blocks = self.policy.blocks()
        retained = blocks[-1].stop if retain_blocks else None
        return Buffers(self.inputs, rows, blocks[0].stop, retained, shared, self.topk is None)

    def logits(self, rows: slice, block: slice, buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of policy and reference for a tile and a block, and memory for the masses."""
        logits, ref_logits, masses = buffers.block(rows.stop - rows.start, block)
        both = (self.policy, self.inputs, logits), (self.reference, self.ref_inputs, ref_logits)
        for head, inputs, out in both:
            head.logits(inputs[rows], buffers.precise(head.weight[block]), block, out)
        return logits, ref_logits, masses

    def candidacy(self) -> Candidacy | None:
        """Collects the heads; None without `topk`."""
        return None if self.topk is None else Candidacy(self.topk)

    def sums(self, rows: slice, block: slice, buffers: Buffers, candidacy: Candidacy | None) -> Tensor:
        """`block_sums` for a tile and a block, shape [rows, 9]; with token values a, [rows, 10].

        The last column is the sum of exp(v) a. The candidates for the head are added to `candidacy`.
        """
        logits, ref_logits, masses = self.logits(rows, block, buffers)
        if candidacy is not None:  # before the logits are overwritten
            candidacy.add(rows, block, logits, ref_logits)
        if self.jsd_weight is not None:  # whose formula needs the logits again, once normalisers are known
            masses.copy_(logits)
            copy, masses, _ = self._scratch(logits)
            ref_logits = copy.copy_(ref_logits)
        sums = fused(block_sums, self.inputs.device)(logits, ref_logits, masses)
        if self.token_values is None:
            return sums
        return torch.cat([sums, (masses @ self.token_values[block]).unsqueeze(1)], 1)

    def jsd_products(self, logits: Tensor, ref_logits: Tensor, normalisers: Tensor) -> tuple[Tensor, Tensor]:
        """The products p s of `block_jsd` for a tile and a block, and the sums; overwrites the logits.

        Args:
            logits: Policy logits, shape [rows, block]; overwritten with p.
            ref_logits: Reference logits, shape [rows, block]; overwritten with the products.
            normalisers: Log normalisers of policy and reference, shape [rows, 2].
        """
        body: Any = fused(block_forward if self.jsd_weight == 1 else block_jsd, self.inputs.device)
        weight = torch.full_like(normalisers[:, :1], self.jsd_weight or 0.0)
        parameters = torch.cat([normalisers, weight], 1)
        return ref_logits, body(logits, ref_logits, *self._scratch(logits), parameters)

    @staticmethod
    def _scratch(like: Tensor) -> list[Tensor]:
        """Memory for intermediate results of the divergence, three times the shape of a block."""
        return [take(name, like, like.numel()).view_as(like) for name in ("first", "second", "third")]

    def with_jsd(self, stats: RowStats, rows: slice, buffers: Buffers) -> RowStats:
        """Add the Jensen-Shannon divergence of a tile, whose logits the buffers have in place of masses.

        They then have p and the products of `jsd_products`.
        """
        if self.jsd_weight is None:
            return stats
        normalisers = torch.stack([stats.normaliser, stats.ref_normaliser], 1).to(self.inputs.dtype)
        sums = torch.zeros_like(normalisers, dtype=torch.float64)
        for block in self.policy.blocks():
            _, ref_logits, logits = buffers.block(rows.stop - rows.start, block)
            sums += self.jsd_products(logits, ref_logits, normalisers)[1]
        jsd = stats.forward_kl if self.jsd_weight == 1 else sums.sum(1).clamp(min=0)
        return stats._replace(jsd=jsd, jsd_slope=sums[:, 0])

    def values_of(self, rows: slice, block: slice) -> list[Tensor]:
        """Token values as an argument of `block_gradient`, expanded to [rows, block]; empty without them."""
        if self.token_values is None:
            return []
        return [self.token_values[block].expand(rows.stop - rows.start, -1)]

    def fields(self, stats: RowStats, heads: TopKRows | None, rows: slice) -> dict[str, Tensor]:
        """The fields of `TokenStats` for a tile, shape [rows], in the precision of the inputs."""
        tokens, dtype = self.tokens[rows], self.inputs.dtype
        fields = {
            "logprobs": self.policy.token_logits(self.inputs[rows], tokens) - stats.normaliser,
            "ref_logprobs": self.reference.token_logits(self.ref_inputs[rows], tokens) - stats.ref_normaliser,
            **{name: getattr(stats, name) for name in ("kl", "entropy", "forward_kl")},
        }
        if stats.jsd is not None:
            fields["jsd"] = stats.jsd
        if self.token_values is not None and stats.expected_value is not None:
            fields |= {"value": self.token_values[tokens], "expected_value": stats.expected_value}
        if heads is not None:
            fields |= heads.sums(tokens)._asdict()
        return {name: field.to(dtype) for name, field in fields.items()}

    def warn_infinite(self, kl: Tensor) -> None:
        """Warn if the KL of a row is infinite, naming a token that only the reference excludes."""
        buffers = self.buffers(retain_blocks=False)
        for row in (kl == torch.inf).nonzero()[:1].flatten().tolist():
            for block in self.policy.blocks():
                logits, ref_logits, _ = self.logits(slice(row, row + 1), block, buffers)
                outside = (logits[0] > -torch.inf) & (ref_logits[0] == -torch.inf)
                if bool(outside.any()):
                    warn_infinite_kl(block.start + int(outside.nonzero()[0]))
                    return


def default_tile_size(vocabulary: int) -> int:
    """Rows per tile for a vocabulary of this size."""
    return _SMALL_TILE_SIZE if vocabulary * _TILE_SIZE > _RETAINED_LOGITS else _TILE_SIZE


def tiles_of(count: int, tile_size: int) -> Iterator[slice]:
    """Slices of `count` rows, one per tile; a single empty slice if there are no rows."""
    for start in range(0, max(count, 1), tile_size):
        yield slice(start, min(start + tile_size, count))


def may_be_retained(count: int, vocabulary: int) -> bool:
    """Whether the logits of `count` rows may be retained until the backward pass."""
    return count * vocabulary <= _RETAINED_LOGITS


def unless_no_grad(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The arguments of an autograd.Function, detached under no_grad.

    Its forward always runs without grad mode and can only ask whether its arguments need gradients.
    """
    if torch.is_grad_enabled():
        return tensors
    return tuple(None if tensor is None else tensor.detach() for tensor in tensors)


def defined(slopes: Tensor, divergence: Tensor) -> Tensor:
    """The weights of a divergence in the loss; NaN where it is infinite, as its gradient then is."""
    return torch.where((divergence == torch.inf) & (slopes != 0), torch.nan, slopes)
