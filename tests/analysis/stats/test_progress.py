"""Outcomes during training, against scipy and by hand."""

import numpy as np
import pytest
from scipy import stats
from synthetic import write_sweep

from analysis.report.assessment import load_assessment
from analysis.report.sections.progress import progress
from analysis.stats.matching import matched_progress
from analysis.stats.pairs import Curves, Pairs
from analysis.stats.progress import differences, reached

STEPS = np.array([0.0, 10.0, 20.0, 40.0])


def evaluations(ours, theirs, betas=None, metric="objective") -> Curves:
    values = np.stack([ours, theirs], axis=1)
    size = len(values)
    betas = np.zeros(size, int) if betas is None else np.array(betas)
    last = values[..., -1]
    pairs = Pairs("a", "b", 0.1 * (1.0 + betas), betas, np.arange(size), np.arange(size), 1 - last, last)
    return Curves(metric, pairs, STEPS, values)


def test_difference_at_each_evaluation_has_the_t_interval_of_its_pairs():
    ours, theirs = np.random.default_rng(0).normal(size=(2, 6, 4))
    for place, estimate in enumerate(differences(evaluations(ours, theirs))):
        found = (ours - theirs)[:, place]
        low, high = stats.t.interval(0.95, 5, loc=found.mean(), scale=stats.sem(found))
        interval = estimate.interval()
        assert [estimate.value, interval.low, interval.high] == pytest.approx([found.mean(), low, high])


def test_each_beta_counts_the_same_with_unequal_numbers_of_pairs():
    ours = np.array([[1.0] * 4, [1.0] * 4, [1.0] * 4, [5.0] * 4])
    estimate = differences(evaluations(ours, np.zeros((4, 4)), betas=[0, 0, 0, 1]))[0]
    assert estimate.value == pytest.approx(3.0)


def test_step_is_interpolated_between_the_evaluations_around_it():
    ours = np.array([[0.0, 1.0, 2.0, 6.0], [0.0, 1.0, 4.0, 8.0], [0.0, 1.0, 3.0, 7.0]])
    theirs = np.array([[0.0, 1.0, 1.0, 2.0]] * 3)
    found = reached(evaluations(ours, theirs), 0)
    assert found.value == pytest.approx(15.0)  # the mean of ours is 1 at 10 and 3 at 20
    # Without each of the three, the mean at 20 is 3.5, 2.5 or 3
    left_out = np.array([10 + 10 / 2.5, 10 + 10 / 1.5, 15.0])
    error = np.sqrt(2 / 3 * ((left_out - left_out.mean()) ** 2).sum())
    assert found.standard_error == pytest.approx(error)


def test_step_is_none_if_the_treatment_stays_below_and_zero_if_it_starts_above():
    low, high = np.zeros((3, 4)), np.ones((3, 4))
    assert reached(evaluations(low, high), 0) is None
    assert reached(evaluations(high, low), 0).value == 0.0
    assert reached(evaluations(low, high, metric="kl"), 0).value == 0.0


def test_objective_is_that_of_the_evaluations_of_the_runs(tmp_path):
    assessment = load_assessment(write_sweep(tmp_path))
    found = matched_progress(assessment.sweep, assessment.comparisons[0].pairs)
    assert found.steps.tolist() == [0, 1, 2, 3, 4]
    index, replicate = int(found.pairs.beta_index[-1]), int(found.pairs.replicate[-1])
    curves = assessment.sweep.grid["RaoBlackwell", index, replicate].curves
    expected = curves["val/reward"].value - found.pairs.beta[-1] * curves["val/kl"].value
    assert found.values[-1, 0] == pytest.approx(expected)


def test_section_has_one_row_per_evaluation_and_is_absent_without_any_between_start_and_end(tmp_path):
    section = progress(load_assessment(write_sweep(tmp_path / "five")))
    assert len(section.figures[0].table.rows) == 5
    assert len(section.tables[0].rows) == 3

    def ends_only(_point, made):
        for curve in made["curves"].values():
            curve.update({key: [values[0], values[-1]] for key, values in curve.items()})
        return made

    assert progress(load_assessment(write_sweep(tmp_path / "two", edit=ends_only))) is None


def test_plan_that_decides_by_the_kl_compares_the_kl(tmp_path):
    sweep = write_sweep(tmp_path, primary={"outcome": "kl"})
    assessment = load_assessment(sweep)
    found = matched_progress(assessment.sweep, assessment.comparisons[0].pairs)
    index, replicate = int(found.pairs.beta_index[0]), int(found.pairs.replicate[0])
    assert found.metric == "kl"
    assert found.values[0, 0].tolist() == pytest.approx(
        assessment.sweep.grid["RaoBlackwell", index, replicate].curves["val/kl"].value.tolist()
    )
