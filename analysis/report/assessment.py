"""A sweep with its comparisons: what every section is built from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from analysis.results import Plan
from analysis.results.load import load_sweep
from analysis.results.sweep import Sweep
from analysis.stats import Comparison, Pairs, Rules, compare
from analysis.stats.matching import match
from analysis.stats.sequential import objective_evidence


@dataclass(frozen=True, eq=False)
class Assessment:
    """A sweep and what the planned tests say about it.

    Attributes:
        sweep: The run directory as read.
        comparisons: One for each estimator other than the control, in plan order; empty if no pair matched.
    """

    sweep: Sweep
    comparisons: tuple[Comparison, ...]

    @property
    def complete(self) -> bool:
        """Whether every planned run has a result or a recorded failure."""
        return not self.sweep.missing

    @property
    def withheld(self) -> str:
        """Why there is no verdict, in a few words; empty if there is one."""
        if self.sweep.invalid:
            return "the files are not those of the plan"
        if not self.complete:
            return "partial sweep"
        return "" if self.comparisons else "no two runs form a matched pair"


def load_assessment(directory: Path) -> Assessment:
    """Read a run directory and run the planned tests on it."""
    sweep = load_sweep(directory)
    plan = sweep.plan
    designs = [match(sweep, name, plan.primary.control) for name in plan.comparisons]
    rules = Rules(plan.primary.alpha, plan.primary.margins, tuple(plan.primary.kl_cuts))
    comparisons = compare([pairs for pairs in designs if len(pairs)], rules)
    not_fixed = _not_fixed(sweep)
    if not_fixed:
        comparisons = tuple(_by_evidence(comparison, sweep, not_fixed) for comparison in comparisons)
    return Assessment(sweep, comparisons)


def _not_fixed(sweep: Sweep) -> str:
    """Why the p-values of a fixed design do not hold; empty if they do."""
    if sweep.locked is not None and sweep.locked.changed_after_results:
        return "the plan was changed after results were published"
    return "the plan is sequential" if sweep.plan.primary.sequential else ""


def _by_evidence(comparison: Comparison, sweep: Sweep, not_fixed: str) -> Comparison:
    """The comparison, decided by the e-process of its pairs."""
    versions = [sweep.plan] if sweep.locked is None else sweep.locked.versions
    pairs = comparison.pairs
    added = np.array(
        [
            _added(versions, pairs, int(index), int(replicate))
            for index, replicate in zip(pairs.beta_index, pairs.replicate, strict=True)
        ]
    )
    evidence = objective_evidence(pairs, _threshold(versions), added)
    return replace(comparison, decision=replace(comparison.decision, evidence=evidence, not_fixed=not_fixed))


def _added(versions: Sequence[Plan], pairs: Pairs, index: int, replicate: int) -> int:
    """The first version of the plan that has a pair."""
    return next(
        place
        for place, plan in enumerate(versions)
        if {pairs.treatment, pairs.control} <= set(plan.grid.arms)
        and index in plan.grid.beta
        and replicate < plan.grid.replicates
    )


def _threshold(versions: Sequence[Plan]) -> float:
    """What an e-process must reach: the comparisons that could have been chosen over the smallest level."""
    names = {name for plan in versions for name in plan.grid.arms}
    controls = {plan.primary.control for plan in versions}
    possible = len(names) - 1 if len(controls) == 1 else math.comb(len(names), 2)
    return possible / min(plan.primary.alpha for plan in versions)
