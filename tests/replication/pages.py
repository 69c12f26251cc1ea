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


def number(value, digits=2, sign=""):
    """A true minus, no negative zero; a plus with `sign="+"`."""
    return f"{round(float(value), digits) + 0.0:{sign}.{digits}f}".replace("-", "−")


def interval(values, level=0.95, digits=2, sign=""):
    found = Estimate.of_mean(np.array(values)).interval(level)
    low, high = (number(end, digits) for end in (found.low, found.high))
    return f"{number(np.mean(values), digits, sign)} ({low} to {high})"


def by_start(folder, arm, control):
    """Mean differences in J, by warm start."""
    pairs = match(sweep_of(folder), arm, control)
    values = objective_contrast(pairs).values
    return [values[pairs.replicate == replicate].mean() for replicate in range(8)]
