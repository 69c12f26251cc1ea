"""What a page says of differences where runs diverged, and have ranks instead of values."""

import numpy as np
import pytest
from synthetic import diverge, write_sweep

from analysis.report.assessment import load_assessment, meaning_of, title_of
from analysis.report.power import power
from analysis.report.sections.summary import summary
from analysis.stats.contrast import objective
from analysis.stats.text import signed

LOST = ("MonteCarlo", 0, 1)
BY_RANKS = "by ranks as runs diverged"


def ahead_where_some_collapse(point, made):
    """The treatment is slightly better, but in one replicate far worse, and a run of the control diverges."""
    if point[0] == "RaoBlackwell":
        made["final"]["reward"] += -9.0 if point[2] == 0 else 0.5
    return diverge(LOST)(point, made)


@pytest.mark.parametrize(
    ("lift", "title"),
    [
        (0.9, f"RaoBlackwell is better than MonteCarlo, {BY_RANKS}"),
        (-0.9, f"RaoBlackwell is worse than MonteCarlo, {BY_RANKS}"),
        (0.0, f"It is open whether RaoBlackwell is better than MonteCarlo, {BY_RANKS}"),
    ],
)
def test_the_title_names_ranks_and_has_no_number_of_them(tmp_path, lift, title):
    made = write_sweep(tmp_path, replicates=6, lift={"RaoBlackwell": lift}, edit=diverge(LOST))
    assessment = load_assessment(made)
    assert title_of(assessment) == title
    assert "Those of RaoBlackwell are of ranks, as runs diverged." in meaning_of(assessment)


def test_ranks_are_said_to_be_ranks_beside_the_mean_of_the_pairs_with_values(tmp_path):
    runs = write_sweep(tmp_path, replicates=10, edit=ahead_where_some_collapse)
    (comparison,) = load_assessment(runs).comparisons
    primary, pairs = comparison.primary, comparison.pairs
    differences = np.subtract(*objective(pairs).T)
    mean = np.mean([np.nanmean(differences[pairs.beta_index == index]) for index in range(3)])
    assert mean < 0 < primary.estimate.value
    start = "RaoBlackwell ranks higher in J = reward − β·KL than MonteCarlo (difference +"
    assert primary.sentence.startswith(start)
    told = f"mean difference in J {signed(mean)} reward units in the 29 pairs in which no run diverged)"
    assert told in primary.sentence
    assert primary.label == "ranks higher in J = reward − β·KL"


def test_every_row_of_the_verdict_has_its_unit(tmp_path):
    arms = ("MonteCarlo", "RaoBlackwell", "Other")
    lost = diverge(("RaoBlackwell", 0, 1))
    runs = write_sweep(tmp_path, estimators=arms, replicates=4, edit=lost)
    (table,) = summary(load_assessment(runs)).tables
    units = [row[table.header.index("Unit")] for row in table.rows]
    assert units == ["rank among the runs of its beta (0 to 1)", "reward units"]
    assert "reward units" not in table.caption


def test_a_pilot_gives_the_spread_of_the_pairs_that_have_a_value(tmp_path):
    assessment = load_assessment(write_sweep(tmp_path / "a", replicates=6, edit=diverge(LOST)))
    pairs = assessment.comparisons[0].pairs
    differences = np.subtract(*objective(pairs).T)
    parts = [differences[pairs.beta_index == index] for index in range(3)]
    error = np.sqrt(sum(np.nanvar(part, ddof=1) / np.isfinite(part).sum() for part in parts)) / 3
    _, source, detected, *_ = power(assessment.sweep.plan, tmp_path / "a")
    assert source.startswith("power, from 17 of 18 pairs of RaoBlackwell against MonteCarlo in ")
    assert 2.5 * error < float(detected.split()[-3]) < 4.5 * error
