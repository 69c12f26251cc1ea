"""The map of credits in distillation agrees with the published sweeps."""

import numpy as np
import pytest

from analysis.checks import load_sweep
from replication.credit import CONTROL, FIGURE, RESULTS, draw_map, log_ratio, relative_seconds


@pytest.mark.usefixtures("pinned_matplotlib")
def test_the_committed_figure_is_drawn_from_the_published_results():
    assert FIGURE.read_text("utf-8") == draw_map() + "\n"


@pytest.mark.parametrize("arm", ["own-sampled", "discount-annealed"])
def test_a_ratio_is_that_of_the_matched_runs(arm):
    sweep = load_sweep(RESULTS / "imdb_distill")
    final = {
        (run.point.arm, run.point.replicate): run.outcome("kl") for run in sweep.grid.values() if run.point
    }
    ratios = [np.log(final[arm, i]) - np.log(final[CONTROL, i]) for i in range(8)]
    found = log_ratio(sweep, arm)
    assert found.value == pytest.approx(np.mean(ratios))
    assert found.standard_error == pytest.approx(np.std(ratios, ddof=1) / np.sqrt(8))


def test_seconds_are_relative_to_the_matched_runs():
    sweep = load_sweep(RESULTS / "smollm2_heal")
    times = {(run.point.arm, run.point.replicate): sweep.seconds[run.cell.id] for run in sweep.grid.values()}
    expected = np.median([times["minillm", i] / times[CONTROL, i] for i in range(8)])
    assert relative_seconds(sweep, "minillm") == pytest.approx(expected)
    assert relative_seconds(load_sweep(RESULTS / "distillation_full"), "future-exact") is None
