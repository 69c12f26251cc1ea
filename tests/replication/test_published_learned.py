"""The page of the learned reward on SmolLM2 has the numbers of its results."""

import json
from pathlib import Path

import numpy as np
import pytest

from analysis.checks import load_sweep
from analysis.stats.contrast import objective_contrast
from analysis.stats.intervals import Estimate
from analysis.stats.matching import match

FOLDER = Path(__file__).parents[2] / "replication" / "results" / "smollm2_learned"
PAGE = " ".join((FOLDER / "README.md").read_text("utf-8").split())
SWEEP = load_sweep(FOLDER)
ARMS = [*SWEEP.plan.grid.arms]
PLANNED = {one["treatment"]: one for one in json.loads((FOLDER / "results.json").read_text())["comparisons"]}


def number(value, digits=2):
    """A true minus, no negative zero."""
    return f"{round(float(value), digits) + 0.0:.{digits}f}".replace("-", "−")


def interval(values, level=0.95):
    found = Estimate.of_mean(np.array(values)).interval(level)
    return f"{number(np.mean(values))} ({number(found.low)} to {number(found.high)})"


def by_start(arm, control):
    pairs = match(SWEEP, arm, control)
    values = objective_contrast(pairs).values
    return [values[pairs.replicate == replicate].mean() for replicate in range(8)]


@pytest.mark.parametrize("arm", ARMS)
def test_each_row_of_the_table(arm):
    runs = [SWEEP.grid[arm, 0, replicate] for replicate in range(8)]
    reward, kl = (np.array([run.outcome(key) for run in runs]) for key in ("reward", "kl"))
    seconds = np.median([SWEEP.seconds[run.cell.id] for run in runs if run.cell.id in SWEEP.seconds])
    cells = [arm, *map(interval, (reward, kl, reward - 0.1 * kl)), f"{seconds:.0f}"]
    if arm in PLANNED:
        objective, starts = PLANNED[arm]["objective"], by_start(arm, "mc")
        cells += [interval(starts, objective["level"]), f"{objective['p_adjusted']:.2g}"]
        cells += [", ".join(map(number, starts))]
    assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("control", ["mc-three", "vine-two"])
def test_what_the_plan_did_not_ask(control):
    assert f"prefix-two minus {control} {interval(by_start('prefix-two', control))}" in PAGE
