"""The map of when less noise pays agrees with the published sweeps."""

import json

import numpy as np
import pytest

from analysis.checks import load_sweep
from replication.pays import (
    FACTORS,
    FIGURE,
    RESULTS,
    Place,
    contrasts,
    draw_pays,
    read_tasks,
    read_toy,
    table,
)

SUMS = "smollm2_sums"
PAGE = RESULTS / "pays" / "README.md"


@pytest.fixture(scope="module")
def toy():
    return read_toy()


@pytest.fixture(scope="module")
def tasks():
    return read_tasks()


@pytest.fixture(scope="module")
def sums():
    return load_sweep(RESULTS / SUMS)


@pytest.mark.usefixtures("pinned_matplotlib")
def test_the_committed_figure_is_drawn_from_the_published_results(toy, tasks):
    assert FIGURE.read_text("utf-8") == draw_pays(toy, tasks) + "\n"


def test_the_page_has_the_numbers_that_are_printed(toy, tasks):
    lines = PAGE.read_text("utf-8").splitlines()
    assert [line for line in table(toy, tasks) if line not in lines] == []


@pytest.mark.parametrize("name", sorted({name for names in FACTORS.values() for name in names}))
def test_differences_are_those_of_the_reports(name, toy):
    numbers = json.loads((RESULTS / "pays" / name / "results.json").read_text())
    (reported,) = (one["objective"] for one in numbers["comparisons"])
    found = toy[name].difference
    assert found.estimate.value == pytest.approx(reported["estimate"])
    assert found.interval.ends == pytest.approx(reported["interval"])


def test_a_place_is_that_of_the_runs(sums):
    found, grid = Place.of(sums, "combination"), sums.grid
    reward, kl = (
        np.array([[grid[arm, 0, i].outcome(key) for i in range(8)] for arm in ("combination", "mc")])
        for key in ("reward", "kl")
    )
    ours, theirs = reward - 0.1 * kl
    share = (ours - theirs).mean() / (theirs.mean() - 0.21875)
    assert found.share.value == pytest.approx(share)
    assert found.shares.mean() == pytest.approx(share)
    assert (found.room, found.completions, found.kl) == (1.0, 8, pytest.approx(kl[1].mean()))
    left_out = [
        (np.delete(ours, i) - np.delete(theirs, i)).mean() / (np.delete(theirs, i).mean() - 0.21875)
        for i in range(8)
    ]
    jackknife = np.sqrt(7 / 8 * ((left_out - np.mean(left_out)) ** 2).sum())
    assert np.std(found.shares, ddof=1) / np.sqrt(8) == pytest.approx(jackknife, rel=0.1)


def test_a_contrast_is_that_of_matched_replicates(toy):
    low, high = toy["eight"], toy["two"]
    found = contrasts(toy)["completions"]
    assert found.value == pytest.approx(high.share.value - low.share.value)
    variance = np.var(high.shares - low.shares, ddof=1) / 8 + low.share_variance + high.share_variance
    assert found.standard_error**2 == pytest.approx(variance)
