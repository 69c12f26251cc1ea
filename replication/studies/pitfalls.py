"""The tabular experiments of Tang and Munos (2025): gradients of KL estimates, and where they lead."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, check_at_least, check_positive
from lit_klrb.estimators import (
    EstimatorMemory,
    K1Loss,
    K2Loss,
    K3Loss,
    K3LossSequence,
    K3Reward,
    KLEstimator,
    MonteCarlo,
    MonteCarloRewardToGo,
    RaoBlackwell,
    RaoBlackwellLite,
    RaoBlackwellLoss,
    RaoBlackwellReward,
)
from lit_klrb.estimators.labels import check_different
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import rounded
from replication import schema
from replication.studies.base import Study
from replication.studies.tabular import TabularPairs, check_enumerable

# Completions of a prompt: the smallest number with a leave-one-out baseline, so all groups are enumerated.
_PAIR = 2
# Rollouts that an estimator remembers before its gradients are enumerated.
_EARLIER = 8


def _estimators() -> list[KLEstimator]:
    unbiased = [MonteCarlo(), MonteCarloRewardToGo(), RaoBlackwell(), RaoBlackwellLite()]
    biased = (K1Loss, K2Loss, K3Loss, K3LossSequence, K3Reward, RaoBlackwellLoss, RaoBlackwellReward)
    return [*unbiased, *(kind(allow_biased=True) for kind in biased)]


@final
@dataclass(frozen=True, kw_only=True)
class PitfallsStudy(Study):
    """Compares estimators on models so small that every completion is enumerated.

    The models have one row of logits per prefix, drawn from a standard normal distribution. Three parts:

    - gradients: for each of many pairs of a random policy and a random reference, the expectation and the
      variance of each estimator's gradient of KL(policy || reference), for two completions with the
      leave-one-out baseline. Both are exact: all pairs of completions are enumerated;
    - kl: gradient descent on the KL alone, with the exact gradient and with each estimator's on sampled
      completions. Recorded are the exact KL(policy || reference) and KL(reference || policy);
    - objective: the same for E[reward] - beta KL with random rewards. Recorded is the exact
      KL(policy || optimum), which is (J(optimum) - J(policy)) / beta.

    Args:
        estimators: Different estimators to compare; by default the unbiased ones, and biased
            ones in use. Those that remember rollouts do so for each model by itself: eight rollouts of
            `completions` before the first part, and those of earlier steps in the others.
        vocabulary: Tokens, EOS included.
        max_length: Maximum length of a completion.
        policies: Pairs of models in the first part.
        runs: Runs of gradient descent in the second and third, each from models of its own.
        steps: Steps of gradient descent, without momentum.
        records: Number of points of each curve after the start; must divide steps.
        learning_rate: Step size.
        completions: Completions per step, in pairs.
        beta: Weight of the KL in the third part, in units of reward per nat.

    Raises:
        ConfigurationError: If a number is out of range or two estimators are the same.

    Reference: Tang, Munos (2025), arXiv:2506.09477, Section 5.
    """

    name: ClassVar[str] = schema.PITFALLS

    estimators: Sequence[KLEstimator] | None = None
    vocabulary: int = 3
    max_length: int = 3
    policies: int = 100
    runs: int = 20
    steps: int = 200
    records: int = 20
    learning_rate: float = 0.5
    completions: int = 16
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_at_least(2, vocabulary=self.vocabulary, policies=self.policies)
        check_at_least(2, runs=self.runs, completions=self.completions)
        check_at_least(1, max_length=self.max_length, records=self.records)
        check_enumerable(self.vocabulary, self.max_length, self.policies, group_size=_PAIR)
        if self.completions % _PAIR:
            raise ConfigurationError(f"must be even, got {self.completions}", key="completions")
        if self.steps < 1 or self.steps % self.records:
            raise ConfigurationError(
                f"must be a multiple of records={self.records}, got {self.steps}", key="steps"
            )
        check_positive(learning_rate=self.learning_rate, beta=self.beta)
        check_different(self.compared)

    @property
    def compared(self) -> Sequence[KLEstimator]:
        """The estimators compared."""
        return _estimators() if self.estimators is None else self.estimators

    def parts(self, seed: int) -> Mapping[str, Callable[[], Any]]:
        """The three parts by estimator; seeds are the same for all estimators."""
        named = {estimator.label: estimator for estimator in self.compared}
        descents: dict[str, KLEstimator | None] = {schema.ANALYTIC: None, **named}
        found: dict[str, Callable[[], Any]] = {}
        for name, estimator in named.items():
            found[f"gradients {name}"] = partial(self._gradients, seed, estimator)
        for part, beta in (("kl", None), ("objective", self.beta)):
            for name, descending in descents.items():
                found[f"{part} {name}"] = partial(self._descend, seed, descending, beta)
        return found

    def artifact(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Design, and the numbers of each part by estimator."""
        by_part: dict[str, dict[str, Any]] = {"gradients": {}, "kl": {}, "objective": {}}
        for place, result in parts.items():
            part, _, name = place.partition(" ")
            by_part[part][name] = result
        return {
            "schema": 1,
            "vocabulary": self.vocabulary,
            "max_length": self.max_length,
            "learning_rate": self.learning_rate,
            "completions": self.completions,
            "beta": self.beta,
            "steps": list(range(0, self.steps + 1, self.steps // self.records)),
            **by_part,
        }

    def _models(self, seed: int, part: str, count: int) -> TabularPairs:
        """`count` random policies with their references and rewards."""
        address = derive_seed(seed, self.name, part)
        return TabularPairs.random(address, count, self.vocabulary, self.max_length)

    def _gradients(self, seed: int, estimator: KLEstimator) -> dict[str, Any]:
        """Exact expectation and variance of the gradient from two completions, for each pair of models."""
        pairs = self._models(seed, "gradients", self.policies)
        memories = _memories(estimator, self.policies)
        for earlier in range(_EARLIER if memories[0].remembers else 0):
            _loss(
                pairs,
                memories,
                pairs.sample(self.completions, derive_seed(seed, self.name, "earlier", earlier)),
            )
        mean, variance = pairs.moments(memories)
        forward = pairs.exact_gradient()
        reverse = pairs.exact_gradient(reverse=True)
        size = forward.norm(dim=1)
        return {
            "bias": rounded((mean - forward).norm(dim=1) / size, 6),
            "noise": rounded(variance.sqrt() / size, 6),
            "cosine": [_cosine(*rows) for rows in zip(mean, forward, strict=True)],
            "reverse_cosine": [_cosine(*rows) for rows in zip(mean, reverse, strict=True)],
        }

    def _descend(self, seed: int, estimator: KLEstimator | None, beta: float | None) -> dict[str, Any]:
        """Gradient descent with an estimator, or with the exact gradient if it is None.

        Returns:
            The distances of `_distances` by name, shape [runs, records + 1] each.
        """
        pairs = self._models(seed, "descent", self.runs)
        memories = [] if estimator is None else _memories(estimator, self.runs)
        recorded = [_distances(pairs, beta)]
        for step in range(1, self.steps + 1):
            pairs.policies.requires_grad_()
            if memories:
                chosen = pairs.sample(self.completions, derive_seed(seed, self.name, "completions", step))
                loss = _loss(pairs, memories, chosen, beta)
            else:
                loss = pairs.exact_loss(beta)
            (gradient,) = torch.autograd.grad(loss, pairs.policies, materialize_grads=True)
            pairs.policies = (pairs.policies - self.learning_rate * gradient).detach()
            if step % (self.steps // self.records) == 0:
                recorded.append(_distances(pairs, beta))
        return {name: rounded(torch.stack([one[name] for one in recorded], dim=1), 6) for name in recorded[0]}


def _memories(estimator: KLEstimator, models: int) -> list[EstimatorMemory]:
    """An estimator's memory of each model; only one, without content, if it remembers nothing."""
    one = EstimatorMemory(estimator)
    return [EstimatorMemory(estimator) for _ in range(models)] if one.remembers else [one]


def _loss(
    pairs: TabularPairs, memories: Sequence[EstimatorMemory], chosen: Tensor, beta: float | None = None
) -> Tensor:
    """The sum over the models of the loss on completions, which are then remembered."""
    alone = len(memories) > 1
    parts = (
        zip(memories, pairs.split(), chosen.split(1), strict=True)
        if alone
        else [(memories[0], pairs, chosen)]
    )
    losses = [one.loss(memory, own, group_size=_PAIR, beta=beta, observe=True) for memory, one, own in parts]
    return torch.stack(losses).sum()


@torch.no_grad()
def _distances(pairs: TabularPairs, beta: float | None) -> dict[str, Tensor]:
    """Both KLs between policy and reference, or the KL of the policy to the optimum, shape [S] each."""
    if beta is not None:
        return {"to_optimum": pairs.kl_to_optimum(beta)}
    return {"forward": pairs.exact_kl(), "reverse": pairs.exact_kl(reverse=True)}


def _cosine(found: Tensor, true: Tensor) -> float | None:
    """The cosine of two gradients; None if the first is zero up to rounding."""
    if found.norm() < 1e-9 * true.norm():
        return None
    cosine: float = rounded(torch.nn.functional.cosine_similarity(found, true, dim=0), 6)
    return cosine
