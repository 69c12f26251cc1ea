"""The k most likely tokens of every row, collected block by block, and the gradients of sums over them."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.functional.logprobs import HeadSums, TopK
from lit_klrb.functional.sums import probabilities_of
from lit_klrb.functional.tiled.blocks import RowStats


class Candidates(NamedTuple):
    """Tokens of each row with their logits under policy and reference, shape [N, k]."""

    tokens: Tensor
    logits: Tensor
    ref_logits: Tensor

    def best(self, topk: TopK) -> "Candidates":
        """The k most likely of them; all, if there are no more."""
        ranked = self.logits if topk.support == "policy" else self.ref_logits
        if ranked.shape[1] <= topk.k:
            return self
        kept = ranked.topk(topk.k, dim=1).indices
        return Candidates(*(field.gather(1, kept) for field in self))


class Candidacy:
    """The best tokens so far of every tile."""

    def __init__(self, topk: TopK) -> None:
        self._topk = topk
        self._tiles: dict[int, Candidates] = {}

    def add(self, rows: slice, block: slice, logits: Tensor, ref_logits: Tensor) -> None:
        """Consider a block of the vocabulary for a tile of rows, shape [rows, block]."""
        tokens = torch.arange(block.start, block.stop, device=logits.device).expand_as(logits)
        best = Candidates(tokens, logits, ref_logits).best(self._topk)
        if rows.start in self._tiles:
            pairs = zip(self._tiles[rows.start], best, strict=True)
            best = Candidates(*(torch.cat(pair, 1) for pair in pairs)).best(self._topk)
        # The buffers of the logits are overwritten by the next block
        self._tiles[rows.start] = Candidates(*(field.clone() for field in best))

    def heads(self, stats: RowStats) -> "TopKRows":
        """The heads of all tiles, in the order of their rows; the candidates are dropped."""
        tiles = [self._tiles.pop(start) for start in sorted(self._tiles)]
        tokens, logits, ref_logits = (torch.cat(fields) for fields in zip(*tiles, strict=True))
        logprobs = logits - stats.normaliser[:, None]
        ref_logprobs = ref_logits - stats.ref_normaliser[:, None]
        # What counts as 0 in the dtype of the logits has to be 0 in float64
        return TopKRows(tokens, logprobs, ref_logprobs, probabilities_of(logprobs, logits.dtype))


class TopKRows(NamedTuple):
    """The head of each row: tokens, their log-probabilities in float64, the policy's masses, shape [N, k]."""

    tokens: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    masses: Tensor

    def sums(self, sampled: Tensor) -> HeadSums:
        """The fields of `TokenStats` for sampled tokens [N], in float64."""
        return HeadSums.of(self.logprobs, self.ref_logprobs, self.tokens, sampled, self.masses)

    def gradient(
        self, of_kl: Tensor, of_mass: Tensor | None, of_forward: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Gradient in the logits of the weighted sum of three sums over the head, weights [N].

        With r the log ratio, those of head_kl, head_mass and head_forward_kl by the log-probability of a
        token in H are p r, p and p - q; that by the logit of v subtracts p_v times the sum over H.

        Returns:
            A factor of p at all tokens, shape [N], and the rest, which is at the head's tokens, [N, k].
        """
        masses = self.masses
        products = torch.where(masses > 0, masses * (self.logprobs - self.ref_logprobs), 0)
        of_kl = of_kl[:, None]
        # A weight of 0 must give 0, even if a log ratio is infinite
        slopes = torch.where(of_kl == 0, 0, of_kl * products)
        if of_mass is not None:
            slopes = slopes + of_mass[:, None] * masses
        if of_forward is not None:
            ref_masses = probabilities_of(self.ref_logprobs)
            infinite = ((self.logprobs == -torch.inf) & (ref_masses > 0)).any(1) & (of_forward != 0)
            slopes = slopes + of_forward.masked_fill(infinite, torch.nan)[:, None] * (masses - ref_masses)
        return -slopes.sum(1), slopes

    def scatter(self, slopes: Tensor, gradient: Tensor, block: slice) -> None:
        """Add values at the head's tokens, [N, k], to a block's gradient [N, block]."""
        inside = (self.tokens >= block.start) & (self.tokens < block.stop)
        columns = torch.where(inside, self.tokens - block.start, 0)
        gradient.scatter_add_(1, columns, torch.where(inside, slopes, 0).to(gradient.dtype))

    @staticmethod
    def joined(parts: list["TopKRows"]) -> "TopKRows":
        """The heads of all rows of the parts."""
        return TopKRows(*(torch.cat(fields) for fields in zip(*parts, strict=True)))

    def rows(self, rows: slice) -> "TopKRows":
        """Those of some rows."""
        return TopKRows(*(field[rows] for field in self))
