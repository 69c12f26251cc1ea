import json
from dataclasses import replace

import numpy as np
import pytest
from synthetic import BETAS, cell, fail, publish, result, write_sweep

from analysis.checks import load_sweep
from analysis.report.matching import match, warm_starts
from analysis.results import DamagedFileError
from analysis.results.records import read_run
from lit_klrb.errors import ConfigurationError


def test_all_of_a_sweep_is_read(tmp_path):
    sweep = load_sweep(write_sweep(tmp_path, replicates=2))
    assert len(sweep.grid) == 12
    assert not sweep.problems
    assert not sweep.missing
    assert [run.cell.stage for run in sweep.landmarks] in (["sft", "dpo"], ["dpo", "sft"])
    assert sweep.plan.primary.control == "MonteCarlo"
    assert sweep.plan.grid.beta == BETAS
    assert warm_starts(sweep) == 1
    run = sweep.grid["RaoBlackwell", 1, 0]
    assert run.point.beta == 0.1
    assert len(run.curves["train/kl"].step) == 20


def test_pairs_have_the_two_runs_of_each_point(tmp_path):
    sweep = load_sweep(write_sweep(tmp_path, replicates=2))
    pairs = match(sweep, "RaoBlackwell", "MonteCarlo")
    for row in range(len(pairs)):
        level, replicate = int(pairs.beta_index[row]), int(pairs.replicate[row])
        assert pairs.reward[row].tolist() == [
            sweep.grid[name, level, replicate].final["reward"] for name in ("RaoBlackwell", "MonteCarlo")
        ]
        assert pairs.beta[row] == BETAS[level]
    assert not pairs.seeds_shared


VALUES = {"reward": [1.234, 0.7666], "kl": [2.0, 3.0]}


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        (VALUES, None),
        ({}, None),
        (VALUES | {"kl": [2.0, 3.01]}, "the mean of prompts.kl is 2.505, final.kl is 2.5"),
        (VALUES | {"kl": [2.0, None]}, "the mean of prompts.kl is nan, final.kl is 2.5"),
        (VALUES | {"kl": [2.5]}, "prompts has different numbers of rewards and KLs"),
        ({"kl": [2.5]}, "KeyError"),
        ({"reward": [], "kl": []}, "prompts has no values"),
        ([2.5], "a valid dictionary"),
    ],
)
def test_values_per_prompt_must_have_the_final_means(tmp_path, prompts, reason):
    final = {"reward": 1.0, "kl": 2.5}
    path = publish(tmp_path, result(cell("rloo", ("a", 0, 0)), final) | {"prompts": prompts})
    if reason is None:
        assert {key: list(values) for key, values in read_run(path).prompts.items()} == prompts
    else:
        with pytest.raises(DamagedFileError, match=reason):
            read_run(path)


def test_seeds_shared_across_betas_swap_whole_replicates(tmp_path):
    sweep = load_sweep(write_sweep(tmp_path, replicates=3))  # an import may have such seeds
    shared = [replace(run, cell=replace(run.cell, seed=run.point.replicate)) for run in sweep.grid.values()]
    sweep = replace(sweep, runs=tuple(shared))
    pairs = match(sweep, "RaoBlackwell", "MonteCarlo")
    assert pairs.seeds_shared
    np.testing.assert_array_equal(pairs.unit, pairs.replicate)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema 2"),
        ({"state": "running"}, "state 'running'"),
        ({"id": "0" * 64}, "holds the result of another cell"),
        ({"cell": None}, "not a result"),
    ],
)
def test_files_that_break_the_format_are_left_out_and_named(tmp_path, change, reason):
    write_sweep(tmp_path, replicates=1)
    path = sorted((tmp_path / "results").glob("*.json"))[0]
    changed = {**json.loads(path.read_text()), **change}
    stored = publish(tmp_path / "results", changed)
    if stored != path:
        stored.replace(path)
    (problem,) = load_sweep(tmp_path).problems
    assert path.name in problem.text
    assert reason in problem.text


def test_a_final_that_is_not_finite_counts_as_diverged(tmp_path):
    def edit(point, made):
        if point == ("RaoBlackwell", 0, 0):
            made["final"]["kl"] = None
        return made

    sweep = load_sweep(write_sweep(tmp_path, replicates=1, edit=edit))
    run = sweep.grid["RaoBlackwell", 0, 0]
    assert run.diverged
    assert np.isnan(run.outcome("reward"))


def test_failures_are_distinguished_from_missing_runs(tmp_path):
    lost = {("RaoBlackwell", 0, 0), ("RaoBlackwell", 1, 0)}
    write_sweep(tmp_path, replicates=2, edit=lambda point, made: None if point in lost else made)
    fail(tmp_path, ("RaoBlackwell", 0, 0))
    sweep = load_sweep(tmp_path)
    assert sweep.missing == [("RaoBlackwell", 1, 0)]
    assert [failure.cell.title for failure in sweep.failures] == ["RaoBlackwell, β = 0.05, replicate 0"]
    assert len(match(sweep, "RaoBlackwell", "MonteCarlo")) == 4


def test_a_directory_without_results_is_a_usage_error(tmp_path):
    with pytest.raises(ConfigurationError, match="no results"):
        load_sweep(tmp_path)
    write_sweep(tmp_path, replicates=1)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ConfigurationError, match=r"has no plan\.json; the directory of a sweep is expected"):
        load_sweep(tmp_path)
