"""Recipes of estimators: per-token values, the tokens they are credited to, and what is differentiated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.credit import Credit, ImportanceWeights
from lit_klrb.functional.kl import kl_k1_per_token, kl_k2_per_token, kl_k3_increments, kl_k3_per_token
from lit_klrb.functional.logprobs import TokenStats
from lit_klrb.functional.topk import (
    head_excess,
    head_forward_excess,
    kl_coarsened,
    sampled_forward_tail,
    sampled_tail,
)


class PerToken(NamedTuple):
    """A per-token value: the sum of two functions of statistics that are 0 outside the mask."""

    symbol: str  # its symbol in formulas; {0} is the position
    # The part that is known before its token is drawn, as an expectation over the vocabulary is: its
    # importance weight is that of the preceding tokens. Shape [B, T]; None for none.
    before: Callable[[TokenStats], Tensor] | None = None
    through: Callable[[TokenStats], Tensor] | None = None  # the part that depends on the token; None for none

    def of(self, stats: TokenStats) -> Tensor:
        """The value, shape [B, T]."""
        parts = [part(stats) for part in (self.before, self.through) if part is not None]
        return torch.stack(parts).sum(0)

    def parts(self, stats: TokenStats, importance: ImportanceWeights) -> list[tuple[Tensor, Tensor]]:
        """The parts and their importance weights, shape [B, T] each."""
        pairs = ((self.before, importance.before), (self.through, importance.through))
        return [(part(stats), weight) for part, weight in pairs if part is not None]


def _field(name: str, needed: str) -> Callable[[TokenStats], Tensor]:
    """Read a field of the statistics that must not be None."""

    def field(stats: TokenStats) -> Tensor:
        values: Tensor | None = getattr(stats, name)
        if values is None:
            raise ConfigurationError(f"stats.{name} is None; this estimator needs {needed}")
        return values

    return field


_EXACT, _VALUES = "the exact KL of every token", "statistics with token values"


# The values that a recipe may name. r_t is the log ratio log p(y_t) - log q(y_t), a(v) a value of each token.
PER_TOKEN = {
    "k1": PerToken("r_{0}", through=lambda stats: kl_k1_per_token(stats.logprobs, stats.ref_logprobs)),
    "k2": PerToken("r_{0}^2 / 2", through=lambda stats: kl_k2_per_token(stats.logprobs, stats.ref_logprobs)),
    "k3": PerToken("k3(r_{0})", through=lambda stats: kl_k3_per_token(stats.logprobs, stats.ref_logprobs)),
    "k3_sequence": PerToken(
        "k3(sum_{{s<={0}}} r_s) - k3(sum_{{s<{0}}} r_s)",
        through=lambda stats: kl_k3_increments(stats.logprobs - stats.ref_logprobs),
    ),
    "kl": PerToken("KL_{0}", before=_field("kl", _EXACT)),
    "forward_kl": PerToken("KL(q||p)_{0}", before=_field("forward_kl", _EXACT)),
    "jsd": PerToken("JSD_{0}", before=_field("jsd", "the divergence of every token (jsd_weight)")),
    "value": PerToken("a(y_{0})", through=_field("value", _VALUES)),
    "expected_value": PerToken("E_{0}[a]", before=_field("expected_value", _VALUES)),
    "topk": PerToken("K_{0}", before=head_excess, through=sampled_tail),
    "coarsened": PerToken("K_{0}", before=kl_coarsened),
    "forward_topk": PerToken("K_{0}", before=head_forward_excess, through=sampled_forward_tail),
}
NOTATION = (
    "r_t = log p(y_t) - log q(y_t), KL_t = KL(p || q) at t over the vocabulary, k3(r) = r + exp(-r) - 1"
)

_SUMS = {"whole": "sum_s {0}", "from_here": "sum_{{s>=t}} {0}", "after": "sum_{{s>t}} {0}", "own": "{0}"}


@dataclass(frozen=True)
class Term:
    """One summand of the score weight c_t.

    Args:
        value: A name of `PER_TOKEN`, or a `PerToken` of one's own.
        credit: The positions s whose values are summed at t: "whole" (all), "from_here" (s >= t), "after"
            (s > t), "own" (s = t).
        factor: Factor of the sum.
        discount: Factor of the value at s > t per token of distance, 0 to 1; below 1 for from_here and after
            only.

    Raises:
        ConfigurationError: If the value or the credit is unknown, or the discount out of range.
    """

    value: str | PerToken
    credit: Credit
    factor: float = 1.0
    discount: float = 1.0

    def __post_init__(self) -> None:
        _check_value("Term.value", self.value)
        if self.credit not in get_args(Credit):
            raise ConfigurationError(
                f"must be one of {', '.join(get_args(Credit))}, got {self.credit!r}", key="Term.credit"
            )
        if not 0 <= self.discount <= 1 or (self.discount < 1 and not self.has_future):
            unless = f"1 with credit {self.credit!r} unless that is from_here or after"
            problem = f"must be between 0 and 1, and {unless}, got {self.discount}"
            raise ConfigurationError(problem, key="Term.discount")

    @property
    def has_future(self) -> bool:
        """Whether the sum is over later positions."""
        return self.credit in ("from_here", "after")

    @property
    def formula(self) -> str:
        """The summand, with its sign.

        Example:
            >>> Term("kl", "after", factor=-1).formula
            '-sum_{s>t} KL_s'
        """
        index = "t" if self.credit == "own" else "s"
        factor = {1.0: "", -1.0: "-"}.get(self.factor, f"{self.factor:g} ")
        discount = "" if self.discount == 1 else f"{self.discount:g}^(s-t) "
        symbol = per_token(self.value).symbol.format(index)
        return factor + _SUMS[self.credit].format(discount + symbol)


@dataclass(frozen=True)
class Recipe:
    """Definition of an estimator of the gradient, g = sum_t [c_t grad log p(y_t) + grad l_t].

    Args:
        value: The per-token KL value that is reported, as in `Term`; None reports 0.
        score: The summands of the score weight c_t; empty for a weight of 0.
        pathwise: The differentiated value l_t; None for 0.

    Raises:
        ConfigurationError: If a value is unknown.

    Example:
        >>> Recipe(value="kl", score=(Term("kl", "after"),), pathwise="kl").formula
        'c_t = sum_{s>t} KL_s, l_t = KL_t'
    """

    value: str | PerToken | None
    score: tuple[Term, ...] = ()
    pathwise: str | PerToken | None = None

    def __post_init__(self) -> None:
        for name in ("value", "pathwise"):
            if getattr(self, name) is not None:
                _check_value(f"Recipe.{name}", getattr(self, name))
        if not isinstance(self.score, tuple) or not all(isinstance(term, Term) for term in self.score):
            raise ConfigurationError(f"must be a tuple of Terms, got {self.score!r}", key="Recipe.score")

    def discounted(self, discount: float) -> "Recipe":
        """The same, with a discount of the credit for later values.

        Example:
            >>> Recipe(value="kl", score=(Term("kl", "after"),), pathwise="kl").discounted(0.5).formula
            'c_t = sum_{s>t} 0.5^(s-t) KL_s, l_t = KL_t'
        """
        terms = (replace(term, discount=discount) if term.has_future else term for term in self.score)
        return replace(self, score=tuple(terms))

    def of_divergence(self, name: str) -> "Recipe":
        """The same with another value of `PER_TOKEN` for the exact KL.

        Example:
            >>> Recipe(value="kl", score=(Term("kl", "after"),), pathwise="kl").of_divergence("jsd").formula
            'c_t = sum_{s>t} JSD_s, l_t = JSD_t'
        """
        value, pathwise = (name if old == "kl" else old for old in (self.value, self.pathwise))
        terms = (replace(term, value=name) if term.value == "kl" else term for term in self.score)
        return Recipe(value, tuple(terms), pathwise)

    @property
    def formula(self) -> str:
        """Score weight and pathwise term; see `NOTATION`."""
        score = " + ".join(term.formula for term in self.score).replace("+ -", "- ") or "0"
        pathwise = "0" if self.pathwise is None else per_token(self.pathwise).symbol.format("t")
        return f"c_t = {score}, l_t = {pathwise}"

    @property
    def cost(self) -> str:
        """What it needs beyond the policy's log-probabilities."""
        undifferentiated = [self.value, *(term.value for term in self.score)]
        if _over_vocabulary(self.pathwise):
            return "both models' logits over the vocabulary"
        if any(map(_over_vocabulary, undifferentiated)):
            return "both models' logits over the vocabulary, no gradient through them"
        if any([self.pathwise, *undifferentiated]):
            return "the reference's log-probability of the sampled tokens"
        return "none"


def per_token(value: str | PerToken) -> PerToken:
    """The value that a recipe names."""
    return value if isinstance(value, PerToken) else PER_TOKEN[value]


def _over_vocabulary(value: str | PerToken | None) -> bool:
    return value is not None and per_token(value).before is not None


def _check_value(key: str, value: str | PerToken) -> None:
    if not isinstance(value, PerToken) and value not in PER_TOKEN:
        raise ConfigurationError(f"must be one of {', '.join(PER_TOKEN)}, got {value!r}", key=key)
