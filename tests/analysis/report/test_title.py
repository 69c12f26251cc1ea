"""The answer of a sweep in one sentence."""

import pytest
from synthetic import diverge, write_sweep

from analysis.report.assessment import load_assessment, title_of

ARMS = ("MonteCarlo", "RaoBlackwell", "RaoBlackwellControlVariate")
OPEN = "It is open whether any of 2 arms"


@pytest.mark.parametrize(
    ("margins", "lifts", "title"),
    [
        ({}, (0.0, 0.0), f"{OPEN} earns more than MonteCarlo"),
        ({}, (-0.5, 0.0), f"{OPEN} earns more than MonteCarlo"),
        ({}, (-0.5, -0.5), "Each of 2 arms is worse than MonteCarlo"),
        ({"objective": 0.3}, (0.0, 0.0), "Each of 2 arms is equivalent to MonteCarlo"),
        ({"objective": 0.3}, (-0.9, 0.0), "No arm of 2 is better than MonteCarlo"),
    ],
    ids=["open", "worse and open", "worse", "equivalent", "worse and equivalent"],
)
def test_no_arm_is_better_only_if_every_verdict_says_so(tmp_path, margins, lifts, title):
    lift = dict(zip(ARMS[1:], lifts, strict=True))
    runs = write_sweep(tmp_path, estimators=ARMS, replicates=6, lift=lift, primary={"margins": margins})
    assert title_of(load_assessment(runs)) == title


def test_where_the_kl_decides_it_is_open_which_arm_ends_nearer(tmp_path):
    runs = write_sweep(tmp_path, estimators=ARMS, replicates=6, primary={"outcome": "kl"})
    assert title_of(load_assessment(runs)) == f"{OPEN} ends nearer to the reference than MonteCarlo"


def test_too_few_runs_are_no_evidence_that_no_arm_is_better(tmp_path):
    assessment = load_assessment(write_sweep(tmp_path, estimators=ARMS, replicates=1, betas={0: 0.1}))
    assert title_of(assessment) == "These runs are too few to tell any of 2 arms from MonteCarlo"


def same(point, made):
    made["final"] |= {"reward": 1.0, "kl": 2.0}
    return made


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("edit", "title"),
    [
        (diverge(), "All runs of {} and MonteCarlo diverged"),
        (same, "No run of {} differs in J from that of MonteCarlo that it is paired with"),
    ],
    ids=["diverged", "same"],
)
def test_runs_without_a_difference_are_not_too_few(tmp_path, edit, title, count):
    runs = write_sweep(tmp_path, estimators=ARMS[:count], replicates=6, edit=edit)
    assert title_of(load_assessment(runs)) == title.format("RaoBlackwell" if count == 2 else "2 arms")
