"""The mean of learning curves, against scipy."""

import numpy as np
import pytest
from scipy import stats
from synthetic import write_sweep

from analysis.report.assessment import load_assessment
from analysis.report.figures import thinned, thinning
from analysis.report.sections.training import mean_curve, training_curves
from analysis.results.records import Curve


def test_mean_and_band_are_those_of_a_t_interval_at_each_common_step():
    rng = np.random.default_rng(0)
    curves = [Curve(np.arange(0, 10, 2.0), rng.normal(size=5)) for _ in range(4)]
    curves.append(Curve(np.arange(2, 7, 1.0), rng.normal(size=5)))  # steps 2, 4 and 6 are common
    curves[0].value[2] = np.nan  # diverged at step 4
    mean, half_width = mean_curve(curves)
    assert mean.step.tolist() == half_width.step.tolist() == [2, 6]
    for place, step in enumerate((2, 6)):
        values = [float(curve.value[curve.step == step][0]) for curve in curves]
        low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
        assert mean.value[place] - half_width.value[place] == pytest.approx(low)
        assert mean.value[place] + half_width.value[place] == pytest.approx(high)


def test_a_single_run_has_no_band():
    curve = Curve(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    mean, half_width = mean_curve([curve])
    assert mean.value.tolist() == [1.0, 2.0]
    assert half_width.value.tolist() == [0.0, 0.0]


def test_what_trains_nothing_is_shown_by_arm(tmp_path, undrawn):
    def with_shares(point, made):
        share = 0.25 * point[2] if point[0] == "MonteCarlo" else 0.5  # by replicate
        made["curves"]["train/equal_rewards"] = {"step": [0, 1], "value": [share, 2 * share]}
        made["curves"]["train/left_out"] = {"step": [0], "value": [7]}
        return made

    runs = write_sweep(tmp_path, betas={0: 0.1}, replicates=2, edit=with_shares)
    (table,) = training_curves(load_assessment(runs)).tables
    assert table.rows == [("MonteCarlo", "19%", "–", "7"), ("RaoBlackwell", "75%", "–", "7")]


def test_curves_of_two_points_are_no_figure(tmp_path, undrawn):
    def two_evaluations(point, made):
        for name in [name for name in made["curves"] if name.startswith("val/")]:
            made["curves"][name] = {"step": [0, 9], "value": [0.0, 1.0]}
        return made

    (both, validation) = training_curves(load_assessment(write_sweep(tmp_path / "all", replicates=2))).figures
    runs = write_sweep(tmp_path / "two", replicates=2, edit=two_evaluations)
    (training,) = training_curves(load_assessment(runs)).figures
    assert training.alt == both.alt != validation.alt


def test_a_caption_says_how_many_runs_are_drawn_if_not_all():
    assert thinning(10, most=10) == ""
    assert len(thinned(range(25), 10)) == 9
    assert thinning(25, most=10) == " Of 25 runs of an arm in a panel, 9 are drawn."
