"""A tile of rows whose blocks are retained until the gradient with respect to its logits is computed."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.functional.credit import weighted
from lit_klrb.functional.sums import probabilities_of
from lit_klrb.functional.tiled.blocks import RowStats, block_gradient, fused
from lit_klrb.functional.tiled.buffers import Buffers
from lit_klrb.functional.tiled.head import HeadGradients
from lit_klrb.functional.tiled.inputs import TiledInputs, defined
from lit_klrb.functional.tiled.topk import TopKRows


class Tile(NamedTuple):
    """Rows of a tile, with the results of `TiledInputs.sums` for all blocks, shape [blocks, N, 9 or 10]."""

    tiled: TiledInputs
    rows: slice
    buffers: Buffers
    sums: Tensor
    stats: RowStats
    heads: TopKRows | None

    @staticmethod
    def of(tiled: TiledInputs, rows: slice, buffers: Buffers) -> "Tile":
        """Compute the logits of some rows, and retain what the gradient needs in the buffers."""
        candidacy = tiled.candidacy()
        blocks = tiled.policy.blocks()
        sums = torch.stack([tiled.sums(rows, block, buffers, candidacy) for block in blocks])
        stats = RowStats.of(sums)
        heads = None if candidacy is None else candidacy.heads(stats)
        stats = tiled.with_jsd(stats, rows, buffers)
        return Tile(tiled, rows, buffers, sums, stats, heads)

    def fields(self) -> dict[str, Tensor]:
        """The fields of `TokenStats`, shape [N]."""
        return self.tiled.fields(self.stats, self.heads, self.rows)

    def backpropagate(self, slopes: dict[str, Tensor], gradients: HeadGradients) -> None:
        """Add the gradient of a loss to those of the head; overwrites the buffers, so it works once.

        Args:
            slopes: Derivatives of the loss with respect to fields of `TokenStats`, shape [N]: to logprobs, kl
                or with its weight jsd or with `topk` those over the head, and expected_value. Those
                that are not there are 0.
            gradients: Receives the gradients.
        """
        tiled, policy = self.tiled, self.tiled.policy
        nothing = tiled.inputs.new_zeros(len(self.sums[0]))
        score = slopes.get("logprobs", nothing)
        stats, by_jsd = self.stats, self.stats.jsd is not None
        kl_weights = slopes.get("jsd" if by_jsd else "kl" if self.heads is None else "head_kl", nothing)
        if self.heads is None:
            kl_weights = defined(kl_weights, stats.kl if stats.jsd is None else stats.jsd)
        value_weights = None if tiled.token_values is None else slopes.get("expected_value", nothing)
        gradient_of = fused(block_gradient, score.device)
        at_all, at_head = None, None
        if self.heads is not None:
            of_head = kl_weights, slopes.get("head_mass"), slopes.get("head_forward_kl")
            at_all, at_head = self.heads.gradient(*of_head)
            kl_weights = nothing
        coefficients = self._coefficients(score, kl_weights, value_weights, at_all)
        for index, block in enumerate(policy.blocks()):
            # What `block_sums` left: exp(v) (w - v), which becomes the gradient, and exp(v)
            _, gradient, masses = self.buffers.block(len(score), block)
            if self.heads is not None:  # not retained: holds the last block's, whose coefficient is 0
                gradient.zero_()
            gradient_of(gradient, masses, coefficients[index], *tiled.values_of(self.rows, block))
            if self.heads is not None and at_head is not None:
                self.heads.scatter(at_head, gradient, block)
            if policy.cap is not None:
                # Recover the logits from exp(v), v = logits - top; masses set to 0 become -inf, so clamp
                top = stats.normaliser[:, None].to(masses.dtype) if by_jsd else self.sums[index, :, :1]
                logits = masses.log_().add_(top).clamp_(min=-policy.cap)
                gradient = policy.through_cap(gradient, logits)
            gradients.add(gradient, self.buffers.precise(policy.weight[block]), self.rows, block)
        # The onehot part of score (onehot - p), one column per row
        gradients.add_tokens(score, tiled.tokens[self.rows], self.rows)

    def _coefficients(
        self, score: Tensor, kl_weights: Tensor, value_weights: Tensor | None, at_all: Tensor | None
    ) -> Tensor:
        """Coefficients for `block_gradient`, shape [blocks, N, 2], or [blocks, N, 3] with token values a.

        Apart from the term of the sampled token, the gradient with respect to the logits is
        kl_weight p (log p - log q - KL) + value_weight p (a - E) - score p, with E the expected value. In
        terms of the results of `block_sums`, p = factor exp(v) and log p - log q = shift - (w - v). The sums
        over the head add `at_all` p, see `TopKRows.gradient`. The Jensen-Shannon divergence has p (s - S) in
        place of the KL's part, with the s of `block_jsd` and its mean S: no block has a factor or a shift.
        """
        stats = self.stats
        if stats.jsd_slope is not None:
            constant = -weighted(kl_weights, stats.jsd_slope) - score
            by_value = []
            if value_weights is not None and stats.expected_value is not None:
                constant, by_value = constant - value_weights * stats.expected_value, [value_weights]
            coefficients = torch.stack([constant, kl_weights, *by_value], -1).to(self.sums.dtype)
            return coefficients.expand(len(self.sums), -1, -1)
        # Each block has its own maxima as reference points of v and w, hence a factor and a shift per block
        log_factor = self.sums[..., 0] - stats.normaliser
        shift = log_factor - (self.sums[..., 1] - stats.ref_normaliser)
        # `weighted`, as a weight of 0 must remove an infinite KL
        constant = kl_weights * shift - weighted(kl_weights, stats.kl) - score
        if at_all is not None:
            constant = constant + at_all
        factor, by_value = probabilities_of(log_factor, self.sums.dtype), []
        if value_weights is not None and stats.expected_value is not None:
            constant = constant - value_weights * stats.expected_value
            by_value = [factor * value_weights]
        # In the float64 of the statistics, as large terms cancel; rounded only for the passes over the block.
        # `weighted`, as the shift of a block that the reference excludes overflows, where the factor is 0
        constant = weighted(factor, constant)
        return torch.stack([constant, -factor * kl_weights, *by_value], -1).to(self.sums.dtype)
