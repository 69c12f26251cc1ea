"""The pages of the frontier on SmolLM2 have the numbers of their results."""

import numpy as np
import pytest
from pages import RESULTS, by_start, interval, number, page_of, sweep_of

from analysis.report.matching import match
from analysis.stats.frontier import pooled_share
from replication.__main__ import frontier

PAIRS = {
    "smollm2_frontier": [("rb", "mc")],
    "smollm2_released": [("rb", "mc"), ("released-rb", "released-mc")],
}
CASES = [(folder, *pair) for folder, pairs in PAIRS.items() for pair in pairs]


@pytest.mark.parametrize(("folder", "arm", "control"), CASES)
def test_each_row_of_the_table(folder, arm, control):
    sweep, page = sweep_of(folder), page_of(folder)
    for index, beta in sweep.plan.grid.beta.items():
        for label in (control, arm):
            runs = [sweep.grid[label, index, replicate] for replicate in range(8)]
            reward, kl = (np.array([run.outcome(key) for run in runs]) for key in ("reward", "kl"))
            cells = [interval(reward), interval(kl), interval(reward - beta * kl)]
            spreads = [number(values.std(ddof=1)) for values in (reward, kl)]
            assert f"| {beta:g} | {label} | {' | '.join([*cells, *spreads])} |" in page


@pytest.mark.parametrize(("folder", "arm", "control"), CASES)
def test_the_difference_by_warm_start(folder, arm, control):
    starts = by_start(folder, arm, control)
    *means, last = map(number, starts)
    told = interval(starts).replace(" (", " (95 % ")
    assert f"differs by {told}; by warm start {', '.join(means)} and {last}" in page_of(folder)


@pytest.mark.parametrize(("folder", "arm", "control"), CASES)
def test_the_shares_of_the_frontier(folder, arm, control):
    pairs, page = match(sweep_of(folder), arm, control), page_of(folder)
    whole, below = (pooled_share(pairs, cut) for cut in (np.inf, 5.0))
    low, high = (f"{end:.0%}".rstrip("%") for end in whole.interval.ends)
    assert f"{whole.count} of its {whole.total} points are of {arm} ({100 * whole.value:.0f} %" in page
    assert f"Clopper-Pearson {low} to {high} %), {below.count} of {below.total} below a KL of 5" in page


def test_the_share_before_the_last_warm_start():
    pairs = match(sweep_of("smollm2_frontier"), "rb", "mc")
    before = pairs.subset(pairs.replicate < 7)
    earlier = [pooled_share(before, cut) for cut in (np.inf, 5.0)]
    told = " and ".join(f"{share.count} of {share.total}" for share in earlier)
    assert f"After seven of the eight warm starts it was {told}" in page_of("smollm2_frontier")


@pytest.mark.usefixtures("pinned_matplotlib")
@pytest.mark.parametrize("folder", PAIRS)
def test_the_committed_figure_is_the_reports(folder):
    assert (RESULTS / folder / "frontier.svg").read_text("utf-8") == frontier(RESULTS / folder) + "\n"


@pytest.mark.parametrize(("folder", "arm", "control"), CASES)
def test_the_variance_of_the_gradients_norm(folder, arm, control):
    sweep, page = sweep_of(folder), page_of(folder)
    norms = [
        np.concatenate(
            [run.curves["train/grad_norm"].value for (own, *_), run in sweep.grid.items() if own == label]
        )
        for label in (control, arm)
    ]
    theirs, ours = (values.var(ddof=1) for values in norms)
    assert f"a variance of {number(theirs)} with {control} and {number(ours)} with {arm}" in page
    assert f"a ratio of {number(ours / theirs)}" in page
