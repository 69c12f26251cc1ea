"""How the pages of published sweeps write their numbers."""

import functools
from pathlib import Path

import numpy as np

from analysis.checks import load_sweep
from analysis.report.matching import match
from analysis.stats.contrast import objective_contrast
from analysis.stats.intervals import Estimate

RESULTS = Path(__file__).parents[2] / "replication" / "results"


@functools.cache
def sweep_of(folder):
    return load_sweep(RESULTS / folder)


def page_of(folder):
    return " ".join((RESULTS / folder / "README.md").read_text("utf-8").split())


def number(value):
    """Two decimals, a true minus, no negative zero."""
    return f"{round(float(value), 2) + 0.0:.2f}".replace("-", "−")


def interval(values, level=0.95):
    found = Estimate.of_mean(np.array(values)).interval(level)
    return f"{number(np.mean(values))} ({number(found.low)} to {number(found.high)})"


def by_start(folder, arm, control):
    """Mean differences in J, by warm start."""
    pairs = match(sweep_of(folder), arm, control)
    values = objective_contrast(pairs).values
    return [values[pairs.replicate == replicate].mean() for replicate in range(8)]
