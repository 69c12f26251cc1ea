"""The page of the frontier on SmolLM2 has the numbers of its results."""

from pathlib import Path

import numpy as np
import pytest

from analysis.checks import load_sweep
from analysis.stats.contrast import objective_contrast
from analysis.stats.frontier import pooled_share, share_contributions
from analysis.stats.intervals import Estimate
from analysis.stats.matching import match
from analysis.stats.swaps import swap_test
from replication.__main__ import frontier

FOLDER = Path(__file__).parents[2] / "replication" / "results" / "smollm2_frontier"


@pytest.fixture(scope="module")
def sweep():
    return load_sweep(FOLDER)


@pytest.fixture(scope="module")
def page():
    return " ".join((FOLDER / "README.md").read_text("utf-8").split())


def number(value):
    """Two decimals, a true minus, no negative zero."""
    return f"{round(float(value), 2) + 0.0:.2f}".replace("-", "−")


def interval(values):
    found = Estimate.of_mean(np.array(values)).interval(0.95)
    return f"{number(np.mean(values))} ({number(found.low)} to {number(found.high)})"


def test_each_row_of_the_table(sweep, page):
    for index, beta in sweep.plan.grid.beta.items():
        for arm in ("mc", "rb"):
            runs = [sweep.grid[arm, index, replicate] for replicate in range(8)]
            reward, kl = (np.array([run.outcome(key) for run in runs]) for key in ("reward", "kl"))
            cells = [interval(reward), interval(kl), interval(reward - beta * kl)]
            spreads = [number(values.std(ddof=1)) for values in (reward, kl)]
            assert f"| {beta:g} | {arm} | {' | '.join([*cells, *spreads])} |" in page


def test_the_difference_by_warm_start(sweep, page):
    pairs = match(sweep, "rb", "mc")
    contrast = objective_contrast(pairs)
    means = [number(contrast.values[pairs.replicate == replicate].mean()) for replicate in range(8)]
    assert f"by warm start {', '.join(means[:-1])} and {means[-1]}." in page


def test_the_shares_of_the_frontier(sweep, page):
    pairs = match(sweep, "rb", "mc")
    before = pairs.subset(pairs.replicate < 7)
    whole, below = (pooled_share(pairs, cut) for cut in (np.inf, 5.0))
    p_values = {number(swap_test(share_contributions(pairs, cut)).p_value) for cut in (np.inf, 5.0)}
    low, high = (f"{end:.0%}".rstrip("%") for end in whole.interval.ends)
    assert f"{whole.count} of its {whole.total} points are of rb ({100 * whole.value:.0f} %" in page
    assert f"Clopper-Pearson {low} to {high} %" in page
    assert f"{below.count} of {below.total} below a KL of 5" in page
    assert [f"swap tests of both give p {p_value}" in page for p_value in p_values] == [True]
    earlier = [pooled_share(before, cut) for cut in (np.inf, 5.0)]
    told = " and ".join(f"{share.count} of {share.total}" for share in earlier)
    assert f"After seven of the eight warm starts it was {told}" in page


@pytest.mark.usefixtures("pinned_matplotlib")
def test_the_committed_figure_is_the_reports():
    assert (FOLDER / "frontier.svg").read_text("utf-8") == frontier(FOLDER) + "\n"


def test_the_variance_of_the_gradients_norm(sweep, page):
    norms = {
        arm: np.concatenate([run.curves["train/grad_norm"].value for run in own])
        for arm in ("mc", "rb")
        if (own := [run for (label, *_), run in sweep.grid.items() if label == arm])
    }
    mc, rb = (values.var(ddof=1) for values in norms.values())
    assert f"a variance of {number(mc)} with mc and {number(rb)} with rb" in page
    assert f"a ratio of {number(rb / mc)}" in page
