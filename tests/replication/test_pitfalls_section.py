"""The section on enumerated models, from an artifact with known numbers."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from analysis.report.build import build
from analysis.report.verify import verify
from replication.__main__ import main
from replication.artifacts import read_pitfalls
from replication.sections import SECTIONS
from replication.sections.pitfalls import _gradients, _mean

BIASES = {"Right": [1e-15, 2e-15], "Wrong": [0.5, 0.7]}


def artifact():
    gradients = {
        name: {"bias": bias, "noise": [2.0, 4.0], "cosine": [1.0, None], "reverse_cosine": [0.5, 0.25]}
        for name, bias in BIASES.items()
    }
    curve = [[1.0, 0.5, 0.25], [3.0, 0.5, 0.75]]
    names = ["analytic", *BIASES]
    return {
        "schema": 1,
        "beta": 0.5,
        "steps": [0, 5, 10],
        "gradients": gradients,
        "kl": {name: {"forward": curve, "reverse": curve} for name in names},
        "objective": {name: {"to_optimum": curve} for name in names},
    }


def test_bias_noise_and_descent_are_on_the_page(sweep_with, undrawn):
    runs = sweep_with(pitfalls=artifact())
    page = build(runs, added=SECTIONS).read_text("utf-8")
    assert "each of 2 random pairs" in page
    found = json.loads((runs / "results.json").read_text())["sections"]["pitfalls"]
    assert found["noise"] == {"Right": 3.0, "Wrong": 3.0}
    assert found["bias"]["Wrong"] == pytest.approx(0.6)
    assert found["forward"]["analytic"] == pytest.approx([0.5, 0.25])  # mean, standard error
    assert verify(runs, SECTIONS).differences == []


def test_rounding_is_no_bias():
    study = read_pitfalls(artifact())
    right, wrong = _gradients(study).rows
    assert right[:2] == ("Right", "0")
    assert wrong[1] == "0.600 (−0.671 to 1.87)"
    assert right[3] == "1.00", "one cosine has no interval"


def test_the_interval_is_that_of_student():
    values = np.array([1.0, 2.0, 4.0, 7.0, math.nan])
    low, high = stats.t.interval(0.95, 3, np.nanmean(values), stats.sem(values[:-1]))
    found = _mean(values).interval()
    assert (found.low, found.high) == pytest.approx((low, high))
    assert _mean(np.array([math.nan, 2.0])).interval() is None


@pytest.mark.parametrize(
    "change",
    [
        {"steps": [0, 10, 5]},
        {"steps": [0, 5]},
        {"kl": {}},
        {"gradients": {}},
        {"objective": {"analytic": {"to_optimum": [[1.0] * 3] * 2}}},
        {"beta": "half"},
    ],
)
def test_a_damaged_artifact_is_named_and_no_traceback(sweep_with, undrawn, change, capsys):
    runs = sweep_with(pitfalls=artifact() | change)
    assert main(["report", str(runs)]) == 2
    assert "not an artifact of pitfalls" in capsys.readouterr().err
