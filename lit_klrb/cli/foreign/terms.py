"""The KL terms of other software's objectives, and what each one equals here."""

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, Self

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import (
    K1Loss,
    K2Loss,
    K3Loss,
    K3Reward,
    KLEstimator,
    MonteCarlo,
    MonteCarloRewardToGo,
)
from lit_klrb.estimators.base import OffPolicy

Place = Literal["loss", "reward", "advantage"]
# How a term's gradient relates to the estimator's.
SAMPLE = "has the gradient of {}, completion by completion"
EXPECTATION = "has the expected gradient of {}, with another baseline"


class Gradient(NamedTuple):
    """The gradient of a KL term.

    Args:
        estimator: The estimator with the same gradient; None if there is none here.
        relation: How the gradients are related, see `SAMPLE`.
        remark: What the gradient is, where no estimator has it, or a reservation.
    """

    estimator: type[KLEstimator] | None
    relation: str = SAMPLE
    remark: str = ""

    def or_remark(self, remark: str) -> Self:
        """The same with a reservation, unless it has one."""
        return self if self.remark else self._replace(remark=remark)


class KLTerm(NamedTuple):
    """A KL term of an objective.

    Args:
        place: Whether it is differentiated in the loss, or subtracted from the reward or a token's advantage.
        value: What is computed per token.
        setting: The keys and values that say so.
        coefficient: Its weight, or the text of an expression.
        coefficient_key: The key of the weight.
        gradient: Its gradient.
        off_policy: The estimator's correction for completions of an earlier policy.
    """

    place: Place
    value: str
    setting: str
    coefficient: float | str
    coefficient_key: str
    gradient: Gradient
    off_policy: OffPolicy = "none"

    @property
    def is_off(self) -> bool:
        """Whether the coefficient is 0."""
        return self.coefficient == 0

    @property
    def equals(self) -> str | None:
        """The estimator's name, with its correction if there is one."""
        if self.gradient.estimator is None:
            return None
        correction = "" if self.off_policy == "none" else f"(off_policy={self.off_policy!r})"
        return self.gradient.estimator.__name__ + correction


class Finding(NamedTuple):
    """What a configuration trains with.

    Args:
        framework: The software, and the version or commit, with its date, whose defaults are assumed.
        trainer: Its algorithm.
        terms: KL terms, including those with a coefficient of 0.
        notes: Normalisation and other reservations.
    """

    framework: str
    trainer: str
    terms: tuple[KLTerm, ...]
    notes: tuple[str, ...]


def gradient_of(table: Mapping[str, Gradient], kind: str, key: str) -> Gradient:
    """The gradient of a kind of estimate, which must be one that is known here."""
    return table[known(kind, table, key)]


def known(name: str, names: Collection[str], key: str) -> str:
    """The name, after checking that it is one of those that are known here.

    Raises:
        ConfigurationError: If not; names the key and the names.
    """
    if name not in names:
        raise ConfigurationError(f"{name} is not known here; {', '.join(names)} are", key=key)
    return name


OWN = "optimises nothing that a KL is: {} times the gradient of the token's own log-probability"
LOSSES = {
    "k1": Gradient(K1Loss),
    "k2": Gradient(K2Loss),
    "k3": Gradient(K3Loss),
    "abs": Gradient(None, remark=OWN.format("the sign of the log ratio")),
}
# The token's own estimate as its advantage, with the token's importance weight.
ADVANTAGE = {
    "k1": Gradient(K2Loss),
    **{kind: Gradient(None, remark=OWN.format(f"its own {kind}")) for kind in ("k2", "k3", "abs")},
}
# Credit of a reward for all tokens of the completion, or for those before the KL.
WHOLE = {
    "k1": Gradient(MonteCarlo),
    "k3": Gradient(K3Reward),
    "k2": Gradient(
        None, remark="optimises half the second moment of the log ratio, without its own gradient"
    ),
    "abs": Gradient(None, remark="optimises the mean absolute log ratio, without its own gradient"),
}
TO_GO = {
    **WHOLE,
    "k1": Gradient(MonteCarloRewardToGo, EXPECTATION),
    "k3": Gradient(K3Reward, EXPECTATION),
}


class Note:
    """Reservations, of normalisation and others."""

    PER_TOKEN = "the loss is a mean over the batch's tokens: reward and KL have the same weight per token"
    PER_LENGTH = (
        "each completion's loss is divided by its length, reward and KL alike: tokens of long completions "
        "count less"
    )
    SUMMED = "the loss is a sum over tokens and a mean over completions, as here"
    DIVIDED = (
        "rewards are divided by their group's standard deviation, the KL is not: its weight in units of "
        "reward is the coefficient times that standard deviation"
    )
    WHITENED = "advantages are whitened over the batch, which changes the weight of the KL per unit of reward"
    FIRST_STEP = "without importance weights: exact only in the first optimizer step of a rollout"
    TEACHER = "the KL is that of the student and its teacher, which is the reference here"
