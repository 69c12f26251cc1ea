"""A sweep with its comparisons, from which all sections are built."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from analysis.results import Plan
from analysis.results.load import load_sweep
from analysis.results.sweep import Sweep
from analysis.stats import Comparison, Pairs, Rules, compare
from analysis.stats.attainment import Reference
from analysis.stats.matching import match, matched_curves
from analysis.stats.objective import objective
from analysis.stats.pairs import Curves
from analysis.stats.sequential import evidence_of
from analysis.stats.tuning import regrets_of
from lit_klrb import schema


@dataclass(frozen=True, eq=False)
class Assessment:
    """A sweep and the results of the planned tests.

    Attributes:
        sweep: The run directory as read.
        comparisons: One per arm other than the control, in plan order; empty without matched pairs.
        withheld: Why there is no verdict, in a few words; empty if there is one.
    """

    sweep: Sweep
    comparisons: tuple[Comparison, ...]
    withheld: str = ""

    @property
    def complete(self) -> bool:
        """Whether every planned run has a result or a recorded failure."""
        return not self.sweep.missing


def load_assessment(directory: Path) -> Assessment:
    """Read a run directory and run the planned tests on it."""
    sweep = load_sweep(directory)
    plan = sweep.plan
    designs = [match(sweep, name, plan.primary.control) for name in plan.comparisons]
    designs = [pairs for pairs in designs if len(pairs)]
    withheld = _withheld(sweep, designs)
    rules = Rules(
        plan.primary.alpha,
        plan.primary.margins,
        tuple(plan.primary.kl_cuts),
        plan.primary.outcome,
        len(plan.comparisons),
        corner_of(sweep),
        withheld,
        regrets_of(sweep),
    )
    comparisons = compare(designs, rules, [_curves(sweep, pairs) for pairs in designs])
    not_fixed = _not_fixed(sweep)
    if not_fixed:
        comparisons = tuple(_by_evidence(comparison, sweep, not_fixed) for comparison in comparisons)
    return Assessment(sweep, comparisons, withheld)


def _withheld(sweep: Sweep, designs: Sequence[Pairs]) -> str:
    if sweep.invalid:
        return "the runs are not those of the plan, or cannot be compared"
    if sweep.missing:
        return "partial sweep"
    return "" if designs else "no two runs form a matched pair"


def _curves(sweep: Sweep, pairs: Pairs) -> list[Curves]:
    metrics = (schema.KL,) if sweep.plan.primary.outcome == schema.KL else (schema.REWARD, schema.KL)
    found = (matched_curves(sweep, pairs, metric) for metric in metrics)
    return [curves for curves in found if curves is not None]


def corner_of(sweep: Sweep) -> Reference | None:
    """The corner of the hypervolume: as planned, otherwise the worst KL and reward of any run.

    Returns:
        KL and reward; None if hypervolume is undefined, as a KL is not positive or the reward is void.
    """
    runs = [run for run in sweep.grid.values() if not run.diverged]
    kl, reward = ([run.outcome(key) for run in runs] for key in (schema.KL, schema.REWARD))
    if not runs or min(kl) <= 0 or sweep.plan.primary.outcome == schema.KL:
        return None
    corner = sweep.plan.primary.corner
    return (corner[0], corner[1]) if corner else (max(kl), min(reward))


def _not_fixed(sweep: Sweep) -> str:
    """Why the p-values of a fixed design are not valid; empty if they are."""
    if sweep.locked is not None and sweep.locked.changed_after_results:
        return "the plan was changed after results were published"
    return "the plan is sequential" if sweep.plan.primary.sequential else ""


def _by_evidence(comparison: Comparison, sweep: Sweep, not_fixed: str) -> Comparison:
    """The comparison, decided by the e-process of its pairs."""
    versions = [sweep.plan] if sweep.locked is None else sweep.locked.versions
    pairs = comparison.pairs
    places = zip(pairs.beta_index.tolist(), pairs.replicate.tolist(), strict=True)
    added = np.array([_added(versions, pairs, *place) for place in places])
    values = -pairs.kl if sweep.plan.primary.outcome == schema.KL else objective(pairs)
    evidence = evidence_of(pairs, values, _threshold(versions), added)
    return replace(comparison, decision=replace(comparison.decision, evidence=evidence, not_fixed=not_fixed))


def _added(versions: Sequence[Plan], pairs: Pairs, index: int, replicate: int) -> int:
    """The index of the first version of the plan that contains a pair."""
    return next(
        place
        for place, plan in enumerate(versions)
        if {pairs.treatment, pairs.control} <= set(plan.grid.arms)
        and index in plan.grid.beta
        and replicate < plan.grid.replicates
    )


def _threshold(versions: Sequence[Plan]) -> float:
    """The threshold of an e-process: the number of possible comparisons divided by the smallest level."""
    names = {name for plan in versions for name in plan.grid.arms}
    controls = {plan.primary.control for plan in versions}
    possible = len(names) - 1 if len(controls) == 1 else math.comb(len(names), 2)
    return possible / min(plan.primary.alpha for plan in versions)
