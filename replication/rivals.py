"""Estimators of other papers, to be compared with those of `lit_klrb.estimators`."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.estimators import ComposedEstimator, LossWeights, MonteCarlo, Recipe, Term
from lit_klrb.estimators.composed import DiscountedEstimator, on_policy_credit
from lit_klrb.estimators.recipe import PerToken
from lit_klrb.functional import TokenStats, leave_one_out_baseline


def james_stein_baseline(values: Tensor, group_size: int) -> Tensor:
    """Leave-one-out means shrunk towards the mean of the other prompts, for each completion.

    The baseline is (1 - λ) · leave-one-out mean + λ · mean of the other prompts with λ = v / (v + s), where v
    is the mean variance of the other prompts' means, estimated within prompts, and s the mean squared
    deviation of these means. It depends on no completion's own value, so the gradient stays unbiased.

    Args:
        values: Shape [..., B], prompt-major.
        group_size: Completions per prompt, K.

    Returns:
        Same shape as `values`; the leave-one-out means if there is one prompt only.

    Example:
        >>> james_stein_baseline(torch.tensor([0.0, 2, 1, 3, 2, 4], dtype=torch.float64), 2)
        tensor([2.4000, 2.0000, 2.5000, 1.5000, 2.0000, 1.6000], dtype=torch.float64)

    Reference: arXiv:2511.03710, as in `compute_jspo_outcome_advantage` of guanning03/JSPO-Official at commit
    3f8539d (2025-11-07).
    """
    groups = values.reshape(*values.shape[:-1], -1, group_size)
    left_out = leave_one_out_baseline(values.movedim(-1, 0), group_size).movedim(0, -1)
    prompts, means = groups.shape[-2], groups.mean(-1)
    if prompts == 1:
        return left_out
    others = (1 - torch.eye(prompts, dtype=values.dtype, device=values.device)) / (prompts - 1)
    centre = means @ others
    noise = groups.var(-1) @ others / group_size
    spread = ((means[..., None, :] - centre[..., None]).square() * others).sum(-1)
    shrink = torch.where(noise > 0, noise / (noise + spread), 0)
    shrink, centre = (each.repeat_interleave(group_size, -1) for each in (shrink, centre))
    return (1 - shrink) * left_out + shrink * centre


@final
@dataclass(frozen=True, kw_only=True)
class JamesSteinMonteCarlo(ComposedEstimator):
    """`MonteCarlo` with the James-Stein baseline of reward - beta · log ratio; on-policy only.

    Reference: see `james_stein_baseline`.
    """

    recipe = MonteCarlo.recipe

    @override
    @torch.no_grad()
    def weights(
        self,
        stats: TokenStats,
        mask: Tensor,
        rewards: Tensor | None = None,
        *,
        beta: float = 1.0,
        group_size: int = 1,
    ) -> LossWeights:
        losses = beta * on_policy_credit(self.recipe, stats.masked(mask))[:, 0]
        if rewards is not None:
            losses = losses - rewards
        score = (losses - james_stein_baseline(losses, group_size))[:, None] * mask
        return LossWeights(score, torch.zeros_like(score))


def score_norms(logits: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Squared norms of the scores of the tokens up to each, sum over s <= t of 1 - 2 p(y_s) + sum_v p(v)^2.

    The score is the gradient of log p(y_s) for the logits, whose norm stands for that of the parameters'.

    Args:
        logits: Divided by the sampling temperature, shape [B, T, V].
        logprobs: log p(y_t), shape [B, T].
        mask: True on completion tokens, shape [B, T].

    Returns:
        Shape [B, T]; 0 outside the mask.

    Example:
        >>> coin = torch.tensor([[0.75, 0.25]]).log().repeat(1, 2, 1)
        >>> score_norms(coin, torch.tensor([[0.75, 0.25]]).log(), torch.ones(1, 2) > 0)
        tensor([[0.1250, 1.2500]])
    """
    squares = logits.softmax(-1).square().sum(-1)
    return torch.where(mask, 1 - 2 * logprobs.exp() + squares, 0).cumsum(1) * mask


def optimal_token_baseline(losses: Tensor, norms: Tensor, group_size: int, *, leave_in: bool) -> Tensor:
    """Means over a prompt's completions, weighted by the norms of their scores, for each position.

    Args:
        losses: What each token is credited with, shape [B, T], prompt-major.
        norms: `score_norms` of the tokens: a completion that has ended has weight 0.
        group_size: Completions per prompt, K.
        leave_in: Include the completion itself, whose weight depends on its own token. As in verl; the
            gradient is then biased.

    Returns:
        Shape [B, T]; 0 where no completion has a weight.

    Example:
        >>> losses, norms = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [1.0], [2.0]])
        >>> optimal_token_baseline(losses, norms, 3, leave_in=False).flatten()
        tensor([3.3333, 3.0000, 1.5000])
        >>> optimal_token_baseline(losses, norms, 3, leave_in=True).flatten()
        tensor([2.7500, 2.7500, 2.7500])

    Reference: arXiv:2602.07078, as in `compute_optimal_token_baseline_advantage` of volcengine/verl.
    """
    sums = [value.reshape(-1, group_size, value.shape[1]) for value in (norms * losses, norms)]
    above, below = ((value.sum(1, keepdim=True) - value * (not leave_in)).flatten(0, 1) for value in sums)
    return torch.where(below > 0, above / below, 0)


@final
@dataclass(frozen=True, kw_only=True)
class MiniLLM(DiscountedEstimator):
    """Each token's exact KL, and the discounted log ratios from it to the end, so that its own counts twice.

    Its authors' code also divides the sum by the number of tokens that are left.

    Reference: arXiv:2306.08543, as in `minillm/minillm/losses.py` of microsoft/LMOps at commit 4f2a9de.
    """

    recipe: ClassVar[Recipe] = Recipe(value="kl", score=(Term("k1", "from_here"),), pathwise="kl")
    refusal = "it counts the own token twice"


def position_weights(log_ratios: Tensor, gamma: float) -> Tensor:
    """Weights that decrease along a completion, w_t = 1 + γ (1 - sum_{s<t} |r_s| / sum_s |r_s|).

    Args:
        log_ratios: r_t = log p(y_t) - log q(y_t), 0 outside the completion, shape [B, T].
        gamma: γ; the first token has weight 1 + γ.

    Returns:
        Shape [B, T].

    Example:
        >>> position_weights(torch.tensor([[1.0, -2.0, 1.0]]), gamma=0.5)
        tensor([[1.5000, 1.3750, 1.1250]])
    """
    sizes = log_ratios.abs()
    preceding = sizes.cumsum(1) - sizes
    return 1 + gamma * (1 - preceding / sizes.sum(1, keepdim=True).clamp_min(1e-8))


def _weighted_log_ratios(stats: TokenStats) -> Tensor:
    log_ratios = stats.logprobs - stats.ref_logprobs
    return position_weights(log_ratios, gamma=0.5) * log_ratios


@final
@dataclass(frozen=True, kw_only=True)
class PositionWeighted(ComposedEstimator):
    """IW-OPD: each token's own log ratio, with `position_weights` of γ = 0.5.

    Reference: arXiv:2606.22600, as in `trl/experimental/iw_opd/iw_opd_trainer.py` of huggingface/trl at
    commit f2cd577, whose default γ this is.
    """

    recipe: ClassVar[Recipe] = Recipe(
        value="k1", score=(Term(PerToken("w_{0} r_{0}", through=_weighted_log_ratios), "own"),)
    )
    refusal = "it omits a token's effect on later KLs, and counts early tokens more than late ones"
