"""Estimators in wide use whose gradient is not that of KL(policy || reference): for study, not for training.

Notation: r_t = log p(y_t) - log q(y_t) (the log ratio), KL_t = KL(p || q) over the vocabulary at t,
k3(r) = r + exp(-r) - 1.

Reference: Tang, Munos (2025), "On a few pitfalls in KL divergence gradient estimation for RL",
arXiv:2506.09477.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from lit_klrb.estimators.base import Explanation
from lit_klrb.estimators.composed import ComposedEstimator, Recipe, Term

_INSTEAD = "use RaoBlackwell (or MonteCarlo, without the vocabulary)"
_TOKENS = "the reference's log-probability of the sampled tokens"
_VOCABULARY = "both models' logits over the vocabulary"
_TOKEN_LEVEL = "it leaves out how earlier tokens change later KLs"


@dataclass(frozen=True, kw_only=True)
class KnownWrongEstimator(ComposedEstimator):
    """An estimator that trains only if the user says so.

    Args:
        allow_biased: Train with it all the same, to reproduce or to study.
    """

    allow_biased: bool = False

    @override
    def check_trainable(self) -> None:
        if not self.allow_biased:
            super().check_trainable()


@final
@dataclass(frozen=True, kw_only=True)
class K1Loss(KnownWrongEstimator):
    """The log ratio as a loss: l_t = r_t."""

    recipe: ClassVar[Recipe] = Recipe(value="k1", pathwise="k1")
    explanation: ClassVar[Explanation] = Explanation(
        formula="c_t = 0, l_t = r_t",
        optimises="nothing: its expected gradient is zero, what remains is noise",
        cost=_TOKENS,
        used_by="implementations that differentiate k1",
        refusal=f"its expected gradient is zero, so that it holds nothing back; {_INSTEAD}",
    )


@final
@dataclass(frozen=True, kw_only=True)
class K2Loss(KnownWrongEstimator):
    """Half the squared log ratio as a loss: l_t = r_t^2 / 2."""

    recipe: ClassVar[Recipe] = Recipe(value="k2", pathwise="k2")
    explanation: ClassVar[Explanation] = Explanation(
        formula="c_t = 0, l_t = r_t^2 / 2",
        optimises="each token's KL given its prefix, the prefixes taken as they come",
        cost=_TOKENS,
        used_by="newer TRL GRPO, NeMo-RL and slime (or importance-weighted k3: the same in expectation)",
        refusal=f"{_TOKEN_LEVEL}; {_INSTEAD}",
    )


@final
@dataclass(frozen=True, kw_only=True)
class K3Loss(KnownWrongEstimator):
    """GRPO's penalty: l_t = k3(r_t)."""

    recipe: ClassVar[Recipe] = Recipe(value="k3", pathwise="k3")
    explanation: ClassVar[Explanation] = Explanation(
        formula="c_t = 0, l_t = r_t + exp(-r_t) - 1",
        optimises="each token's KL(reference || policy) given its prefix: the other direction",
        cost=_TOKENS,
        used_by="GRPO in verl, SkyRL, open-instruct, torchtune and older TRL",
        refusal=f"its gradient is the token-level part of that of KL(reference || policy); {_INSTEAD}",
    )


@final
@dataclass(frozen=True, kw_only=True)
class K3LossSequence(KnownWrongEstimator):
    """k3 of the whole sequence as a loss: k3(sum_t r_t)."""

    recipe: ClassVar[Recipe] = Recipe(value="k3_sequence", pathwise="k3_sequence")
    explanation: ClassVar[Explanation] = Explanation(
        formula="c_t = 0, sum_t l_t = k3(sum_t r_t)",
        optimises="KL(reference || policy), exactly: the other direction",
        cost=_TOKENS,
        used_by="studies of GRPO's penalty",
        refusal=f"its gradient is that of KL(reference || policy); {_INSTEAD}",
        caution="its variance can be unbounded",
    )


@final
@dataclass(frozen=True, kw_only=True)
class K3Reward(KnownWrongEstimator):
    """k3 as a penalty in the reward: c_t = sum over all s of k3(r_s)."""

    recipe: ClassVar[Recipe] = Recipe(value="k3", score=(Term("k3", "whole"),))
    explanation: ClassVar[Explanation] = Explanation(
        formula="c_t = sum_s k3(r_s), l_t = 0",
        optimises="the KL less the other direction's token-level part: near zero close to the reference",
        cost=_TOKENS,
        used_by="tunix PPO (its default); asked for by users of TRL",
        refusal=f"it leaves out how k3 itself changes with the policy; {_INSTEAD}",
    )


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellLoss(KnownWrongEstimator):
    """The exact per-token KL as a loss: l_t = KL_t."""

    recipe: ClassVar[Recipe] = Recipe(value="kl", pathwise="kl")
    explanation: ClassVar[Explanation] = Explanation(
        formula="c_t = 0, l_t = KL_t",
        optimises="each token's KL given its prefix, the prefixes taken as they come",
        cost=_VOCABULARY,
        used_by="token-level KL losses; on-policy distillation",
        refusal=f"{_TOKEN_LEVEL}; {_INSTEAD}",
    )


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellReward(KnownWrongEstimator):
    """The exact per-token KL as a penalty in the reward: c_t = sum over all s of KL_s."""

    recipe: ClassVar[Recipe] = Recipe(value="kl", score=(Term("kl", "whole"),))
    explanation: ClassVar[Explanation] = Explanation(
        formula="c_t = sum_s KL_s, l_t = 0",
        optimises="how tokens change later KLs, without the change of their own",
        cost=_VOCABULARY,
        used_by='the older "full" KL penalty',
        refusal=f"it leaves out the gradient of KL_t itself; {_INSTEAD}",
    )
