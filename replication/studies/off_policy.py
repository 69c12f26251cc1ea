"""Bias and variance of off-policy corrections over inner steps, exactly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final, get_args

import torch

from lit_klrb.errors import check_at_least, check_positive
from lit_klrb.estimators import KLEstimator, MonteCarlo, RaoBlackwell
from lit_klrb.estimators.base import OffPolicy
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import rounded
from replication import schema
from replication.studies.base import Study
from replication.studies.tabular import TabularPairs, check_enumerable

# What is estimated: the gradient of the KL alone, or of the whole objective.
TERMS = ("kl", "objective")
_ESTIMATORS: dict[str, type[KLEstimator]] = {"MonteCarlo": MonteCarlo, "RaoBlackwell": RaoBlackwell}


@final
@dataclass(frozen=True, kw_only=True)
class OffPolicyStudy(Study):
    """Computes how biased and how noisy gradients are after some inner steps on one rollout.

    Completions are sampled from a random policy, which then takes inner steps of gradient descent along the
    exact gradient of beta KL - E[reward]. After each step the study computes expectation and variance of the
    gradient from two completions of the *first* policy, under each estimator and each value of `off_policy`,
    relative to the exact gradient at the *current* policy. Both are exact: all pairs of completions are
    enumerated. Score weights and baselines are those of the rollout, as in training.

    Args:
        vocabulary: Tokens, EOS included.
        max_length: Maximum length of a completion.
        policies: Number of random policies, each with a reference and rewards.
        inner_steps: Number of inner steps.
        learning_rate: Step size of the inner steps.
        beta: Weight of the KL, in units of reward per nat.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    name: ClassVar[str] = schema.OFF_POLICY

    vocabulary: int = 3
    max_length: int = 3
    policies: int = 30
    inner_steps: int = 8
    learning_rate: float = 0.3
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_at_least(2, vocabulary=self.vocabulary, policies=self.policies)
        check_at_least(1, max_length=self.max_length, inner_steps=self.inner_steps)
        check_enumerable(self.vocabulary, self.max_length, self.policies, group_size=2)
        check_positive(learning_rate=self.learning_rate, beta=self.beta)

    def parts(self, seed: int) -> Mapping[str, Callable[[], Any]]:
        """One part per estimator and correction."""
        return {
            f"{name} {correction}": partial(self._moments, seed, kind(off_policy=correction))
            for name, kind in _ESTIMATORS.items()
            for correction in get_args(OffPolicy)
        }

    def artifact(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Design, the movement of the policies, and bias and noise by estimator, correction and term."""
        moments: dict[str, dict[str, Any]] = {}
        for place, result in parts.items():
            name, correction = place.split(" ")
            moments.setdefault(name, {})[correction] = {term: result[term] for term in TERMS}
            moved = result["moved"]
        return {
            "schema": 1,
            "vocabulary": self.vocabulary,
            "max_length": self.max_length,
            "learning_rate": self.learning_rate,
            "beta": self.beta,
            "steps": list(range(self.inner_steps + 1)),
            "moved": moved,
            "moments": moments,
        }

    def _moments(self, seed: int, estimator: KLEstimator) -> dict[str, Any]:
        """Bias and noise after 0, 1, ... inner steps, and KL(current || first), shape [policies, steps]."""
        address = derive_seed(seed, self.name, "models")
        pairs = TabularPairs.random(address, self.policies, self.vocabulary, self.max_length)
        first = pairs.policies
        found: dict[str, list[torch.Tensor]] = {"moved": []}
        for _ in range(self.inner_steps + 1):
            found["moved"].append(TabularPairs(pairs.policies, first, self.max_length).exact_kl())
            for term, beta in zip(TERMS, (None, self.beta), strict=True):
                exact = pairs.exact_gradient(beta)
                mean, variance = pairs.moments(estimator, beta, behaviour=first)
                size = exact.norm(dim=1)
                found.setdefault(f"{term} bias", []).append((mean - exact).norm(dim=1) / size)
                found.setdefault(f"{term} noise", []).append(variance.sqrt() / size)
            step = pairs.exact_gradient(self.beta).view_as(first)
            pairs.policies = pairs.policies - self.learning_rate * step
        columns = {name: rounded(torch.stack(values, dim=1), 6) for name, values in found.items()}
        by_term = {term: {kind: columns[f"{term} {kind}"] for kind in ("bias", "noise")} for term in TERMS}
        return {"moved": columns["moved"], **by_term}
