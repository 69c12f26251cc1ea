"""Estimators in wide use whose gradient is not that of KL(policy || reference): for study, not for training.

Notation: r_t = log p(y_t) - log q(y_t) (the log ratio), KL_t = KL(p || q) over the vocabulary at t,
k3(r) = r + exp(-r) - 1.

Reference: Tang, Munos (2025), "On a few pitfalls in KL divergence gradient estimation for RL",
arXiv:2506.09477.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from lit_klrb.estimators.composed import ComposedEstimator
from lit_klrb.estimators.labels import Explanation
from lit_klrb.estimators.recipe import Recipe, Term
from lit_klrb.estimators.topk import TopKEstimator

_INSTEAD = "use RaoBlackwell (or MonteCarlo, without the vocabulary)"
_TOKEN_LEVEL = "it omits the effect of earlier tokens on later KLs"


@final
@dataclass(frozen=True, kw_only=True)
class K1Loss(ComposedEstimator):
    """The log ratio as a loss."""

    recipe = Recipe(value="k1", pathwise="k1")
    refusal = f"its expected gradient is zero, so it does not regularise; {_INSTEAD}"
    explanation = Explanation(
        optimises="nothing: its expected gradient is zero, only noise remains",
        used_by="the default type of a KL in slime's loss; an option in verl, SkyRL, OpenRLHF, open-instruct",
    )


@final
@dataclass(frozen=True, kw_only=True)
class K2Loss(ComposedEstimator):
    """Half the squared log ratio as a loss: l_t = r_t^2 / 2."""

    recipe = Recipe(value="k2", pathwise="k2")
    refusal = f"{_TOKEN_LEVEL}; {_INSTEAD}"
    explanation = Explanation(
        optimises="each token's KL given its prefix, with the distribution of prefixes held fixed",
        used_by="GRPO in TRL and NeMo-RL, as importance-weighted k3, whose gradient is the same; "
        "distillation in Tinker, prime-rl and slime, as advantage",
    )


@final
@dataclass(frozen=True, kw_only=True)
class K3Loss(ComposedEstimator):
    """GRPO's penalty: l_t = k3(r_t).

    Example: the gradient of the KL is (-0.5493, 0.5493) there (see `RaoBlackwell`); this is p - q,
        that of KL(reference || policy).

        >>> import torch
        >>> from lit_klrb.functional import token_stats
        >>> logits, reference = torch.zeros(2, requires_grad=True), torch.tensor([0.9, 0.1]).log()
        >>> tokens, mask = torch.tensor([[0], [1]]), torch.ones(2, 1, dtype=torch.bool)
        >>> stats = token_stats(logits.expand(2, 1, 2), reference.expand(2, 1, 2), tokens)
        >>> K3Loss(baseline=None, allow_biased=True).surrogate(stats, mask).backward()
        >>> logits.grad
        tensor([-0.4000,  0.4000])
    """

    recipe = Recipe(value="k3", pathwise="k3")
    refusal = f"its gradient is the token-level part of that of KL(reference || policy); {_INSTEAD}"
    explanation = Explanation(
        optimises="each token's KL(reference || policy) given its prefix: the other direction",
        used_by="a KL in the loss in verl, SkyRL, ms-swift, Liger and open-instruct; distillation in verl "
        "and torchrl",
    )


@final
@dataclass(frozen=True, kw_only=True)
class K3LossSequence(ComposedEstimator):
    """k3 of the whole sequence as a loss: k3(sum_t r_t)."""

    recipe = Recipe(value="k3_sequence", pathwise="k3_sequence")
    refusal = f"its gradient is that of KL(reference || policy); {_INSTEAD}"
    explanation = Explanation(
        optimises="KL(reference || policy), exactly: the other direction",
        used_by="studies of GRPO's penalty",
        caution="its variance can be unbounded",
    )


@final
@dataclass(frozen=True, kw_only=True)
class K3Reward(ComposedEstimator):
    """k3 as a penalty in the reward: c_t = sum over all s of k3(r_s)."""

    recipe = Recipe(value="k3", score=(Term("k3", "whole"),))
    refusal = f"it omits the gradient of k3 itself; {_INSTEAD}"
    explanation = Explanation(
        optimises="the KL minus the other direction's token-level part: near zero close to the reference",
        used_by="an option of a KL in the reward in verl, SkyRL and OpenRLHF",
    )


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellLoss(ComposedEstimator):
    """The exact per-token KL as a loss: l_t = KL_t."""

    recipe = Recipe(value="kl", pathwise="kl")
    refusal = f"{_TOKEN_LEVEL}; {_INSTEAD}"
    explanation = Explanation(
        optimises="each token's KL given its prefix, with the distribution of prefixes held fixed",
        used_by="on-policy distillation in TRL (its default), ms-swift and NeMo-RL",
    )


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellReward(ComposedEstimator):
    """The exact per-token KL as a penalty in the reward: c_t = sum over all s of KL_s."""

    recipe = Recipe(value="kl", score=(Term("kl", "whole"),))
    refusal = f"it omits the gradient of KL_t itself; {_INSTEAD}"
    explanation = Explanation(
        optimises="the effect of tokens on later KLs, without the gradient of each token's own KL",
        used_by='the older "full" KL penalty',
    )


@final
@dataclass(frozen=True, kw_only=True)
class CoarsenedTopK(TopKEstimator):
    """The exact KL of distributions with k + 1 outcomes: the head H, and all other tokens merged into one.

    Coarsening never increases a KL, so this is a lower bound; what it lacks is (1 - P) KL given that the
    token is outside H, in value and gradient. Nothing of it is sampled but the completion: where k is large
    or completions are few, its bias can cost less than the noise of `RaoBlackwellTopK`.

    Example: the head of `RaoBlackwellTopK`'s example leaves two tokens with one log ratio, so nothing lacks.

        >>> import torch
        >>> from lit_klrb.functional import token_stats
        >>> policy, reference = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.2, 0.4, 0.4]).log()
        >>> tokens, mask = torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.bool)
        >>> estimator = CoarsenedTopK(k=1)
        >>> shape = (1, 1, 3)
        >>> stats = token_stats(policy.expand(shape), reference.expand(shape), tokens, topk=estimator.topk)
        >>> estimator.value(stats, mask)
        tensor([0.2231])
    """

    recipe = Recipe(value="coarsened", score=(Term("coarsened", "after"),), pathwise="coarsened")
    estimate: ClassVar[str] = "sum_H p r + (1 - P) log((1 - P) / (1 - Q)), P = sum_H p, Q = sum_H q"
    refusal = "it does not see differences among the tokens outside H; use RaoBlackwellTopK"
    explanation = Explanation(
        optimises="the KL of distributions with k + 1 outcomes, a lower bound",
        used_by="distillation in verl (pull request 7855), miles (1322) and slime (2033), without credit for "
        "later tokens, which is discount 0",
    )
