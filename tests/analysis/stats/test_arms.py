"""Descriptive results of a sweep, compared with the result files."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from synthetic import BETAS, diverge, grid_results, write_sweep

from analysis.checks import load_sweep
from analysis.report.matching import arm_outcomes, compared, start_of


def test_means_and_matched_differences_are_those_of_the_files(tmp_path):
    edit = diverge(("RaoBlackwell", 1, 2))
    runs = write_sweep(tmp_path, replicates=4, lift={"RaoBlackwell": 0.3}, edit=edit)
    values = grid_results(runs)
    sweep = load_sweep(runs)
    outcomes = {(one.label, one.beta): one for one in arm_outcomes(sweep, compared(sweep))}
    assert len(outcomes) == 6
    for (label, beta), found in outcomes.items():
        index = next(key for key, value in BETAS.items() if value == beta)
        lost = (label, index) == ("RaoBlackwell", 1)
        kept = [r for r in range(4) if not (lost and r == 2)]
        assert (found.n, found.diverged) == (len(kept), int(lost))

        def j(arm, replicate, index=index, beta=beta):
            final = values[arm, index, replicate]["final"]
            return final["reward"] - beta * final["kl"]

        mine = [j(label, r) for r in kept]
        low, high = stats.ttest_1samp(mine, 0).confidence_interval(0.95)
        assert found.means["objective"].value == pytest.approx(np.mean(mine))
        assert found.means["objective"].interval().low == pytest.approx(low)
        assert found.means["objective"].interval().high == pytest.approx(high)
        if label == "MonteCarlo":
            assert not found.differences
            continue
        paired = np.array([j(label, r) - j("MonteCarlo", r) for r in kept])
        assert found.differences["objective"].value == pytest.approx(paired.mean())
        assert found.differences["objective"].standard_error == pytest.approx(stats.sem(paired))
        assert (found.higher["objective"], found.pairs) == ((paired > 0).sum(), len(kept))


START = {"reward": 0.5, "kl": 0.4, "objective": pytest.approx(0.5 - 0.1 * 0.4)}


def test_the_start_is_the_first_evaluation_or_that_of_the_stage_before(tmp_path):
    sweep = load_sweep(write_sweep(tmp_path / "a", replicates=2, betas={0: 0.1}))
    firsts = [run.curves["val/reward"].value[0] for run in sweep.grid.values()]
    assert start_of(sweep)["reward"] == pytest.approx(np.mean(firsts))

    def bare(point, made):
        made["curves"] = {}
        return made

    sweep = load_sweep(write_sweep(tmp_path / "b", replicates=2, betas={0: 0.1}, edit=bare))
    assert start_of(sweep) == {**START, "length": None}
    # the warm start, not the reference before it
    evaluated = {"reward": 0.1, "kl": 0.0}
    runs = [replace(run, final=evaluated) if run.cell.stage == "sft" else run for run in sweep.runs]
    assert start_of(replace(sweep, runs=tuple(runs))) == {**START, "length": None}


def test_a_run_without_reward_has_diverged_where_j_decides(tmp_path):
    def torn(point, made):
        if point == ("MonteCarlo", 0, 0):
            del made["final"]["reward"]
        return made

    sweep = load_sweep(write_sweep(tmp_path, replicates=2, edit=torn))
    assert sweep.grid["MonteCarlo", 0, 0].diverged
    assert math.isnan(sweep.grid["MonteCarlo", 0, 0].outcome("kl"))
