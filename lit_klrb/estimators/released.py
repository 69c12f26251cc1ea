"""The estimators of the code released with arXiv:2504.10637 (rycolab/kl-rb), for exact replication."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.estimators.composed import ComposedEstimator, log_ratio_to_behaviour
from lit_klrb.estimators.labels import Explanation
from lit_klrb.estimators.recipe import Recipe, Term
from lit_klrb.estimators.shapes import LossWeights
from lit_klrb.functional.credit import weighted
from lit_klrb.functional.logprobs import TokenStats
from lit_klrb.functional.surrogate import clipped_loss


@dataclass(frozen=True, kw_only=True)
class ReleasedEstimator(ComposedEstimator):
    """The KL of the whole sequence inside an advantage A that is not detached.

    Under "clip" the ratio is that of whole sequences, and clipping stops the gradient of the ratio but not
    that of the KL inside A: loss = max(-A ratio, -A clip(ratio)).
    """

    @property
    @override
    def credits_own_kl_in_loss(self) -> bool:
        return self.off_policy != "none"

    @override
    def loss(
        self,
        stats: TokenStats,
        mask: Tensor,
        weights: LossWeights,
        *,
        beta: float = 1.0,
        behaviour_logprobs: Tensor | None = None,
    ) -> Tensor:
        if self.off_policy != "clip":
            return super().loss(stats, mask, weights, beta=beta, behaviour_logprobs=behaviour_logprobs)
        log_ratio = log_ratio_to_behaviour(stats.masked(mask).logprobs, mask, behaviour_logprobs).sum(-1)
        # Score weights are equal at all tokens of a completion and 0 outside the mask: the mean recovers them
        score = torch.where(mask, weights.score, 0).sum(-1) / mask.sum(-1).clamp(min=1)
        cost = score + weighted(beta, self.value(stats, mask))  # minus A, with the KL not detached
        return clipped_loss(log_ratio, cost, self.clip_range)


@final
@dataclass(frozen=True, kw_only=True)
class ReleasedMonteCarlo(ReleasedEstimator):
    """`MonteCarlo` plus the gradient of the log ratio itself, which has mean zero but adds variance."""

    recipe = Recipe(value="k1", score=(Term("k1", "whole"),), pathwise="k1")
    explanation = Explanation(
        optimises="the gradient of KL(policy || reference), plus the zero-mean noise grad log p(y)",
        used_by="rycolab/kl-rb (its MC arm)",
        caution="up to 20 times the variance of MonteCarlo at a small KL",
    )


@final
@dataclass(frozen=True, kw_only=True)
class ReleasedRaoBlackwell(ReleasedEstimator):
    """`RaoBlackwellSequence`, except under "clip", where sequences are clipped and the KL is not detached."""

    recipe = Recipe(value="kl", score=(Term("kl", "whole"),), pathwise="kl")
    explanation = Explanation(
        optimises="the gradient of KL(policy || reference)",
        used_by="rycolab/kl-rb (its RB arm)",
        caution="1 to 9 times the variance of RaoBlackwell",
    )
