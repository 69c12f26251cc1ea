"""Descriptive results: the start of the runs, and KL, reward and J of each arm at each beta."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.results.records import Run
from analysis.results.sweep import Sweep
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray
from lit_klrb import schema

# The key of J = reward - beta * KL.
OBJECTIVE = "objective"


@dataclass(frozen=True)
class ArmOutcome:
    """One arm at one beta.

    Attributes:
        label: The arm.
        beta: The weight of the KL.
        n: Runs that did not diverge.
        diverged: Runs that diverged.
        means: Mean over replicates of "reward", "kl", "objective" and "length", with its standard error.
        differences: Mean matched difference to the control, by the same keys; empty for the control itself.
        higher: Number of matched pairs in which the arm has the higher value, by the same keys.
        pairs: Matched pairs without a diverged run.
    """

    label: str
    beta: float
    n: int
    diverged: int
    means: dict[str, Estimate]
    differences: dict[str, Estimate]
    higher: dict[str, int]
    pairs: int


def arm_outcomes(sweep: Sweep, keys: Sequence[str]) -> list[ArmOutcome]:
    """Every arm at every beta, in plan order, with some outcomes, such as those of `compared`."""
    grid, plan = sweep.grid, sweep.plan
    control = plan.primary.control
    found = []
    for label in plan.grid.arms:
        for index, beta in plan.grid.beta.items():
            mine = {
                replicate: grid[label, index, replicate]
                for replicate in range(plan.grid.replicates)
                if (label, index, replicate) in grid
            }
            runs = {replicate: run for replicate, run in mine.items() if not run.diverged}
            values = {key: _values(list(runs.values()), key, beta) for key in keys}
            # The control's runs, where neither of the pair diverged
            others = {
                replicate: run
                for replicate in (runs if label != control else ())
                if (run := grid.get((control, index, replicate))) is not None and not run.diverged
            }
            matched = [runs[replicate] for replicate in others]
            differences = {
                key: _values(matched, key, beta) - _values(list(others.values()), key, beta)
                for key in (values if label != control else ())
            }
            found.append(
                ArmOutcome(
                    label,
                    beta,
                    len(runs),
                    len(mine) - len(runs),
                    {key: Estimate.of_mean(value) for key, value in values.items()},
                    {key: Estimate.of_mean(value) for key, value in differences.items()},
                    {key: _higher(value, values[key]) for key, value in differences.items()},
                    len(others),
                )
            )
    return found


def _higher(differences: FloatArray, values: FloatArray) -> int:
    """Number of positive differences; a rounding error, relative to the values, is none."""
    return int((differences > 2.0**-32 * np.abs(values).max(initial=0.0)).sum())


def compared(sweep: Sweep) -> tuple[str, ...]:
    """The keys of the described outcomes; without reward and J if the plan decides by the KL.

    The length of completions is one of them, if all runs have it: a low KL may be that of completions that
    end at once.
    """
    alone = sweep.plan.primary.outcome == schema.KL
    outcomes = (schema.KL,) if alone else (schema.REWARD, schema.KL, OBJECTIVE)
    lengths = [run.outcome(schema.LENGTH) for run in sweep.grid.values() if not run.diverged]
    return (*outcomes, schema.LENGTH) if lengths and np.isfinite(lengths).all() else outcomes


def _values(runs: Sequence[Run], key: str, beta: float) -> FloatArray:
    if key == OBJECTIVE:
        return _values(runs, schema.REWARD, beta) - beta * _values(runs, schema.KL, beta)
    return np.array([run.outcome(key) for run in runs])


def start_of(sweep: Sweep) -> dict[str, float | None]:
    """Reward, KL and length at the start of the runs of the grid.

    From the runs' evaluation before the first step, which is the same for all runs of a block; if there is
    none, from the final evaluation of the last stage that they start from. With blocks, their mean.
    """
    found: dict[str, float | None] = {}
    stages = list(sweep.plan.stages)
    before = sorted(
        (run for run in sweep.landmarks if np.isfinite(run.outcome(schema.KL))),
        key=lambda run: stages.index(run.cell.stage),
    )
    starts = {run.cell.needs for run in sweep.grid.values()}
    latest = [own[-1] for needs in starts if (own := [run for run in before if run.cell.id in needs])]
    for key in (schema.REWARD, schema.KL, schema.LENGTH):
        first = [value for run in sweep.grid.values() if (value := run.first(key)) is not None]
        last = np.mean([run.outcome(key) for run in latest]) if latest else np.nan
        found[key] = float(np.mean(first)) if first else float(last) if np.isfinite(last) else None
    return found
