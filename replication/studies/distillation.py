"""On-policy distillation of enumerated models: which credit for the KL ends nearest to the teacher."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.estimators import (
    EstimatorMemory,
    K2Loss,
    KLEstimator,
    MonteCarlo,
    MonteCarloRewardToGo,
    RaoBlackwell,
    RaoBlackwellLite,
    RaoBlackwellLoss,
    RaoBlackwellTopK,
)
from lit_klrb.functional.enumeration import num_prefixes
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import rounded
from replication import schema
from replication.studies.base import Study
from replication.studies.tabular import TabularPairs, check_enumerable
from replication.topk_rivals import (
    TopKBaseline,
    TopKTruncated,
)

Capacity = Literal["full", "limited"]
# Completions of a group, whose mean without the own one is the baseline.
_GROUP = 4
# Adam's defaults.
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
# Bias of EOS in the teacher's logits, for completions longer than a token or two.
_EOS_BIAS = -1.5
# The KL of a run that diverged.
DIVERGED = 1e6


class MapPoint(NamedTuple):
    """A point of the map.

    Args:
        capacity: Whether the student has a row of logits per prefix, or one per last token.
        distance: Standard deviation of its initial logits around the teacher's.
        batch: Completions per step.
    """

    capacity: Capacity
    distance: float
    batch: int


def _arms(vocabulary: int) -> dict[str, KLEstimator]:
    return {
        "own token, sampled": K2Loss(),
        "own token, vOPD": TopKBaseline(k=vocabulary, discount=0.0),
        "own token, exact": RaoBlackwellLoss(),
        "own token, top 1": TopKTruncated(k=1, discount=0.0),
        "discount 0.5, exact": RaoBlackwell(discount=0.5),
        "discount 0.8, exact": RaoBlackwell(discount=0.8),
        "discount 0.95, exact": RaoBlackwell(discount=0.95),
        "whole future, exact": RaoBlackwell(),
        "whole future, lite": RaoBlackwellLite(),
        "whole future, top 1": RaoBlackwellTopK(k=1),
        "whole future, sampled": MonteCarloRewardToGo(),
        "whole sequence, sampled": MonteCarlo(),
    }


# An arm whose discount increases linearly over the run, from the own token to the whole future.
ANNEALED = "discount 0 to 1, exact"


@final
@dataclass(frozen=True, kw_only=True)
class DistillationStudy(Study):
    """Minimises KL(student || teacher) with each estimator, on a map of problems.

    The map is the product of capacities, distances and batches. Each point has `selection` + `evaluation`
    runs, each with a random teacher, student and completions of its own, the same for all estimators. Every
    run takes Adam steps at each learning rate, with linear decay to zero, and ends with its exact KL. An
    estimator's rate is to be chosen on the selection runs, and judged on the evaluation runs.

    Args:
        arms: Label -> estimator; by default credit for the own token, the future and between, sampled and
            exact. Beside them, "analytic" follows the exact gradient, and "discount 0 to 1, exact" is
            `RaoBlackwell` with a discount that increases linearly over the run.
        vocabulary: Tokens, EOS included.
        max_length: Maximum length of a completion.
        capacities: "full": the student has a row of logits per prefix and can match the teacher; "limited":
            one per last token, so it cannot.
        distances: Standard deviations of the student's initial logits around the teacher's.
        batches: Completions per step, in groups of 4.
        learning_rates: Peak learning rates.
        selection: Runs on which rates are chosen.
        evaluation: Runs on which estimators are compared.
        steps: Steps of each run.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    name: ClassVar[str] = schema.DISTILLATION

    arms: dict[str, KLEstimator] | None = None
    vocabulary: int = 3
    max_length: int = 5
    capacities: Sequence[Capacity] = ("full", "limited")
    distances: Sequence[float] = (0.5, 2.0)
    batches: Sequence[int] = (4, 32)
    learning_rates: Sequence[float] = (0.05, 0.15, 0.5)
    selection: int = 6
    evaluation: int = 30
    steps: int = 60

    def __post_init__(self) -> None:
        check_at_least(2, vocabulary=self.vocabulary, selection=self.selection, evaluation=self.evaluation)
        check_at_least(1, max_length=self.max_length, steps=self.steps)
        check_enumerable(self.vocabulary, self.max_length, self.selection + self.evaluation)
        for name in ("distances", "learning_rates"):
            values = getattr(self, name)
            if not values or not all(0 < value < math.inf for value in values):
                raise ConfigurationError(f"must be positive and finite, got {list(values)}", key=name)
        if not self.batches or any(batch < _GROUP or batch % _GROUP for batch in self.batches):
            raise ConfigurationError(
                f"must be multiples of {_GROUP}, got {list(self.batches)}", key="batches"
            )
        if not self.capacities or any(one not in get_args(Capacity) for one in self.capacities):
            raise ConfigurationError(
                f"must be full or limited, got {list(self.capacities)}", key="capacities"
            )

    @property
    def compared(self) -> dict[str, KLEstimator]:
        """Label -> estimator."""
        return _arms(self.vocabulary) if self.arms is None else self.arms

    @property
    def cells(self) -> list[MapPoint]:
        """The points of the map."""
        return [MapPoint(*place) for place in product(self.capacities, self.distances, self.batches)]

    def parts(self, seed: int) -> Mapping[str, Callable[[], Any]]:
        """One part per arm and point of the map."""
        found: dict[str, Callable[[], Any]] = {}
        for index, cell in enumerate(self.cells):
            found[f"start {index}"] = partial(self._start, seed, cell)
            found[f"{schema.ANALYTIC} {index}"] = partial(self._run, seed, cell, None)
            found[f"{ANNEALED} {index}"] = partial(self._run, seed, cell, _annealed)
            for label, estimator in self.compared.items():
                found[f"{label} {index}"] = partial(self._run, seed, cell, partial(_constant, estimator))
        return found

    def artifact(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The design, and for each arm the final KL by point of the map, rate and run."""
        finals: dict[str, list[Any]] = {}
        for place, result in parts.items():
            finals.setdefault(place.rpartition(" ")[0], []).append(result)
        return {
            "schema": 1,
            "vocabulary": self.vocabulary,
            "max_length": self.max_length,
            "steps": self.steps,
            "learning_rates": list(self.learning_rates),
            "selection": self.selection,
            "evaluation": self.evaluation,
            "cells": [cell._asdict() for cell in self.cells],
            "start": finals.pop("start"),
            "finals": finals,
        }

    def _pairs(self, seed: int, cell: MapPoint) -> TabularPairs:
        """A student and a teacher of each run; the same for all batches."""
        generator = torch.Generator().manual_seed(derive_seed(seed, self.name, "models", cell.capacity))
        runs, rows = self.selection + self.evaluation, num_prefixes(self.vocabulary, self.max_length)
        shape = runs, rows, self.vocabulary
        teachers, noise = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
        teachers[..., 0] += _EOS_BIAS
        students = teachers
        if cell.capacity == "limited":
            contexts = self.vocabulary - 1
            last = torch.arange(rows) % contexts
            students = torch.stack([teachers[:, last == row].mean(1) for row in range(contexts)], dim=1)
            noise = noise[:, :contexts]
        return TabularPairs(students + cell.distance * noise, teachers, self.max_length)

    def _start(self, seed: int, cell: MapPoint) -> list[float]:
        """The KL of each run before the first step."""
        found: list[float] = rounded(self._pairs(seed, cell).exact_kl(), 6)
        return found

    def _run(
        self, seed: int, cell: MapPoint, estimator_at: Callable[[float], KLEstimator] | None
    ) -> list[list[float]]:
        """The final KL at each rate of each run; without an estimator, descent along the exact gradient."""
        once = self._pairs(seed, cell)
        runs, rates = len(once.policies), torch.tensor(self.learning_rates, dtype=torch.float64)
        # All rates at once, with the same completions of each run as long as the policies are the same
        pairs = TabularPairs(
            once.policies.repeat(len(rates), 1, 1), once.references.repeat(len(rates), 1, 1), self.max_length
        )
        size = rates.repeat_interleave(runs)[:, None, None]
        optimizer = _Adam(pairs.policies)
        for step in range(self.steps):
            pairs.policies.requires_grad_()
            if estimator_at is None:
                loss = pairs.exact_loss()
            else:
                estimator = estimator_at(step / max(1, self.steps - 1))
                chosen = self._completions(pairs, seed, cell, step, runs)
                loss = pairs.loss(EstimatorMemory(estimator), chosen, group_size=_GROUP)
            (gradient,) = torch.autograd.grad(loss, pairs.policies, materialize_grads=True)
            with torch.no_grad():
                decayed = size * (1 - step / self.steps)
                pairs.policies = pairs.policies.detach() - decayed * optimizer.direction(gradient)
        final = pairs.exact_kl().nan_to_num(nan=DIVERGED, posinf=DIVERGED).clamp(max=DIVERGED)
        found: list[list[float]] = rounded(final.view(len(rates), runs), 6)
        return found

    def _completions(self, pairs: TabularPairs, seed: int, cell: MapPoint, step: int, runs: int) -> Tensor:
        """Indices of completions, from uniforms that depend on run and step only, shape [rates * runs, K]."""
        generator = torch.Generator().manual_seed(derive_seed(seed, self.name, "completions", step))
        uniforms = torch.rand(runs, cell.batch, dtype=torch.float64, generator=generator)
        return pairs.at(uniforms.repeat(len(pairs.policies) // runs, 1))


def _constant(estimator: KLEstimator, progress: float) -> KLEstimator:
    return estimator


def _annealed(progress: float) -> KLEstimator:
    return RaoBlackwell(discount=progress)


class _Adam:
    """The direction of Adam's steps, for a batch of independent runs."""

    def __init__(self, like: Tensor) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.steps = 0

    def direction(self, gradient: Tensor) -> Tensor:
        """What a step of size 1 subtracts."""
        self.steps += 1
        self.first = _BETAS[0] * self.first + (1 - _BETAS[0]) * gradient
        self.second = _BETAS[1] * self.second + (1 - _BETAS[1]) * gradient.square()
        corrected = [m / (1 - b**self.steps) for m, b in zip((self.first, self.second), _BETAS, strict=True)]
        return corrected[0] / (corrected[1].sqrt() + _EPSILON)
