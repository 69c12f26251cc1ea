"""The published result of a run: curves of all attempts, finite numbers, no times."""

import json

import pytest

from analysis.results.curves import curves
from analysis.results.records import read_run
from analysis.results.store import encode_result, read_result
from analysis.sweep.job import harvest


def write(metrics, attempts):
    for name, text in attempts.items():
        path = metrics / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return curves(metrics)


def test_a_later_attempt_replaces_what_came_after_its_first_step(tmp_path):
    stitched = write(
        tmp_path,
        {
            # Ran on past its last checkpoint, at step 2, and had logged an evaluation before it.
            "attempt_2/metrics.csv": "step,train/loss,val/kl\n0,1,\n1,2,\n1,,9\n2,3,\n3,4,\n5,6,\n",
            # Attempts are numbers: the tenth comes after the second.
            "attempt_10/metrics.csv": "step,train/loss,val/kl\n2,30,\n3,40,\n3,,90\n",
        },
    )
    assert stitched["train/loss"] == {"step": [0, 1, 2, 3], "value": [1.0, 2.0, 30.0, 40.0]}
    assert stitched["val/kl"] == {"step": [1, 3], "value": [9.0, 90.0]}


def test_values_of_curves_have_six_digits_or_are_none_if_not_finite(tmp_path):
    text = "step,train/loss,val/kl\n1,0.30000001192092896,1234567.8\n2,1e-05,0.12345678\n3,nan,-inf\n"
    found = write(tmp_path, {"attempt_0.csv": text})
    assert [curve["value"] for curve in found.values()] == [[0.3, 1e-05, None], [1234570.0, 0.123457, None]]


@pytest.mark.parametrize(
    ("state", "final", "expected"),
    [
        ("done", {"reward": 1.0, "kl": 0.5}, "done"),
        ("done", {"loss": 1.0}, "done"),
        ("done", {"reward": 1.0, "kl": 0.5, "reward_se": float("nan")}, "done"),
        ("done", {"reward": float("inf"), "kl": 0.5}, "diverged"),
        ("done", {"reward": 1.0, "kl": None}, "diverged"),
        ("diverged", {}, "diverged"),
    ],
)
def test_a_run_without_a_finite_reward_or_kl_has_diverged(tmp_path, cells, state, final, expected):
    result = harvest(cells[2], tmp_path, {"state": state, "final": final, "versions": {"torch": "2"}})
    assert result["state"] == expected
    assert set(result["final"]) == set(final)
    json.dumps(result, allow_nan=False)
    assert result["id"] == cells[2].id
    assert result["cell"] == cells[2].record()
    assert result["versions"] == {"torch": "2"}


def test_the_hashes_of_weights_and_rows_are_published(tmp_path, cells):
    """Runs that diverged have none, and those of earlier versions."""
    summary = {"state": "done", "final": {}, "versions": {}}
    assert "weights_sha256" not in harvest(cells[0], tmp_path, summary)
    hashes = {"weights_sha256": "1f", "rows_sha256": {"train": "2e"}, "processes": 2, "rows_per_step": 8}
    result = harvest(cells[0], tmp_path, summary | hashes)
    assert result["weights_sha256"] == "1f"
    path = tmp_path / f"{cells[0].id}.json"
    path.write_bytes(encode_result(result))
    run = read_run(path)
    assert (run.rows, run.processes, run.step_rows) == ({"train": "2e"}, 2, 8)
    assert read_result(path)["weights_sha256"] == "1f"


def test_studies_are_published_with_the_run(tmp_path, cells):
    summary = {"state": "done", "final": {}, "versions": {}}
    assert "studies" not in harvest(cells[0], tmp_path, summary)
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "estimation.json").write_text('{"snapshots": [1]}')
    assert harvest(cells[0], tmp_path, summary)["studies"] == {"estimation": {"snapshots": [1]}}


def test_completions_of_the_newest_evaluation_are_published(tmp_path, cells):
    folder = tmp_path / "completions"
    folder.mkdir()
    header = "text_at_start,reward_at_start,text,reward\n"
    (folder / "step_000002.csv").write_text(header + '"old",1.0,"old",1.0\n')
    rows = [f'"a, ""{n}""",{n}.5,"{"b" * 2000}",nan\n' for n in range(9)]
    (folder / "step_000010.csv").write_text(header + "".join(rows))
    (folder / "test.csv").write_text(header)
    found = harvest(cells[0], tmp_path, {"state": "done", "final": {}, "versions": {}})["completions"]
    assert len(found) == 5
    assert found[1] == {"text_at_start": 'a, "1"', "reward_at_start": 1.5, "text": "b" * 1000, "reward": None}


def test_rewards_and_kls_of_prompts_are_published_with_four_digits_unless_diverged(tmp_path, cells):
    summary = {"state": "done", "final": {"reward": 1.0, "kl": 2.0}, "versions": {}}
    assert "prompts" not in harvest(cells[0], tmp_path, summary)
    (tmp_path / "evaluation.csv").write_text("prompt,reward,kl,length\n0,-0.123456,1e-07,3\n1,12345.6,2,4\n")
    found = harvest(cells[0], tmp_path, summary)["prompts"]
    assert found == {"reward": [-0.1235, 12350.0], "kl": [1e-07, 2.0]}
    for diverged in (summary | {"state": "diverged"}, summary | {"final": {"reward": None, "kl": 2.0}}):
        assert "prompts" not in harvest(cells[0], tmp_path, diverged)


def test_hyperparameters_are_published_without_paths(tmp_path, cells):
    config = {
        "model": {"class_path": "x.RLOOModule", "init_args": {"learning_rate": 0.1, "policy_path": "/a/b"}},
        "kl": {"estimator": {"class_path": "x.RaoBlackwell", "init_args": {"clip_range": 0.2}}, "beta": 0.3},
        "data": {"init_args": {"source": "grammar", "files": ["a"]}},
        "trainer": {"max_steps": 6, "precision": None, "default_root_dir": "there"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    found = harvest(cells[0], tmp_path, {"state": "done", "final": {}, "versions": {}})["settings"]
    assert found == {
        "model.class_path": "x.RLOOModule",
        "model.learning_rate": 0.1,
        "kl.estimator.class_path": "x.RaoBlackwell",
        "kl.estimator.clip_range": 0.2,
        "kl.beta": 0.3,
        "data.source": "grammar",
        "trainer.max_steps": 6,
    }
