"""The choice of a rate for each arm, from the runs of the tuning stage.

The choice is a function of published results, which are never overwritten. It is locked in `plan.json` before
the first run of the grid starts, outside the plan's hash, which is that of the plan before all results.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from analysis.results.artifacts import FloatArray
from analysis.results.locked import Choice
from analysis.results.plan import Plan
from analysis.results.records import Run


def trial_outcomes(plan: Plan, runs: Iterable[Run]) -> dict[str, FloatArray]:
    """Arm -> what decides (J, or the negative KL) in the runs of the tuning stage, [replicates, rates].

    Rates ascend; outcomes are means over betas, `nan` where a run is missing or diverged.
    """
    if plan.tuning is None:
        return {}
    outcomes: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for run in runs:
        if run.cell.trial is not None:
            trial = run.cell.trial
            outcomes[trial.arm, trial.replicate, trial.rate].append(run.decisive(plan.primary.outcome))
    betas, rates = len(plan.grid.beta), sorted(plan.tuning.rates)

    def mean(point: tuple[str, int, float]) -> float:
        values = outcomes.get(point, [])
        return sum(values) / betas if len(values) == betas else math.nan

    return {
        arm: np.array([[mean((arm, r, rate)) for rate in rates] for r in range(plan.tuning.replicates)])
        for arm in plan.grid.arms
    }


def choice_of(plan: Plan, runs: Sequence[Run]) -> Choice:
    """The choice as it is locked: the rates, and the checksums of the runs they rest on.

    An arm's rate is the one with the best mean, of those at which no run diverged; an arm without one lacks.
    """
    rates = sorted(plan.tuning.rates) if plan.tuning else []
    means = {arm: outcomes.mean(axis=0) for arm, outcomes in trial_outcomes(plan, runs).items()}
    best = {arm: rates[int(np.nanargmax(mean))] for arm, mean in means.items() if np.isfinite(mean).any()}
    trials = {run.cell.id: run.checksum for run in runs if run.cell.trial is not None}
    return Choice(best, dict(sorted(trials.items())))


def edge_of(rates: Sequence[float], rate: float) -> str:
    """Whether a rate is the "smallest" or the "largest" of ascending rates, or neither, ""."""
    return {rates[0]: "smallest", rates[-1]: "largest"}.get(rate, "")


def at_the_edge(plan: Plan, chosen: Mapping[str, float]) -> list[str]:
    """A line on the arms at the smallest, and at the largest rate tried, with the two rates beyond it."""
    rates = sorted(plan.tuning.rates) if plan.tuning else []
    lines = []
    for rate in dict.fromkeys(chosen.values()):
        if rates and (edge := edge_of(rates, rate)):
            arms = [arm for arm, of_arm in chosen.items() if of_arm == rate]
            are, their = ("is", "its") if len(arms) == 1 else ("are", "their")
            inner = rates[1] if edge == "smallest" else rates[-2]
            beyond = " and ".join(f"{rate * (rate / inner) ** step:.2g}" for step in (1, 2))
            lines.append(
                f"{' and '.join(arms)} {are} at the {edge} rate tried, {rate:g}: {their} optimum may lie "
                f"beyond, and the next two rates to try are {beyond}"
            )
    return lines
