"""The commands and the files of a run."""

import csv
import json

import pytest
import torch
from runs import equal, rows_of, weights_of

from lit_klrb.cli.main import main


def final_of(run):
    return json.loads((run / "summary.json").read_text())["final"]


def test_a_run_leaves_its_configuration_metrics_checkpoint_and_summary(chain):
    for stage in ("sft", "dpo", "rloo"):
        run = chain.root / stage
        assert {"config.yaml", "metrics", "tensorboard", "checkpoints", "summary.json"} <= {
            path.name for path in run.iterdir()
        }
        summary = json.loads((run / "summary.json").read_text())
        assert summary["state"] == "done"
        assert {"torch", "processor"} <= {*summary["versions"]}
    assert summary["steps"] == 6
    assert {"reward", "reward_se", "kl", "kl_se", "length"} <= set(summary["final"])


def test_the_final_evaluation_is_kept_per_prompt(chain):
    assert not (chain.root / "sft" / "evaluation.csv").exists()
    for stage in ("dpo", "rloo"):
        with (chain.root / stage / "evaluation.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["prompt"] for row in rows] == [str(prompt) for prompt in range(8)]
        for name in ("reward", "kl", "length"):
            values = torch.tensor([float(row[name]) for row in rows])
            assert values.mean().item() == pytest.approx(final_of(chain.root / stage)[name], rel=1e-5)
            error = values.std().item() / 8**0.5
            assert error == pytest.approx(final_of(chain.root / stage)[f"{name}_se"], rel=1e-5)


def test_the_evaluation_before_the_first_step_is_logged_and_the_last_one_is_the_result(chain):
    rows = [row for row in rows_of(chain.root / "rloo") if row["val/kl"]]
    assert [int(row["step"]) for row in rows] == [0, 3, 6]
    assert float(rows[-1]["val/kl"]) == final_of(chain.root / "rloo")["kl"]
    # It starts exactly where the warm start ended: same prompts, seeds and policy.
    before, warm = rows[0], final_of(chain.root / "dpo")
    assert float(before["val/kl"]) == warm["kl"] > 0
    assert float(before["val/reward"]) == warm["reward"]
    first = next(row for row in rows_of(chain.root / "dpo") if row["val/kl"])
    assert float(first["val/kl"]) == pytest.approx(0, abs=1e-6)


def test_the_reference_knows_the_entropy_of_its_source(chain):
    from lit_klrb.data.grammar import ReviewGrammar

    final = final_of(chain.root / "sft")
    assert final["excess"] == pytest.approx(
        final["loss"] / ReviewGrammar().entropy_per_token(given=1) - 1, rel=1e-5
    )


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluation_commands_print_the_common_evaluation(chain, capsys, command, tmp_path):
    extra = ["--ckpt_path", chain.checkpoint("rloo")]
    assert chain.run(command, "rloo", *extra, run=tmp_path / "run") == 0
    output = capsys.readouterr().out
    assert "reward" in output
    assert "kl" in output
    if command == "validate":
        assert f"{final_of(chain.root / 'rloo')['reward']:.3f}" in output
    assert not (tmp_path / "run").exists()


def test_a_folder_and_a_checkpoint_start_the_same_run(chain, tmp_path):
    folder = tmp_path / "dpo"
    assert main(["export", "--ckpt_path", chain.checkpoint("dpo"), "--output_dir", str(folder)]) == 0
    assert chain.run("fit", "rloo", "--model.policy_path", str(folder), run=tmp_path / "run") == 0
    assert equal(weights_of(chain.root / "rloo"), weights_of(tmp_path / "run"))


def test_an_earlier_run_in_the_same_place_is_kept(chain, tmp_path, capsys):
    run = tmp_path / "run"
    extra = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"]
    for _ in range(3):
        assert chain.run("fit", "sft", *extra, run=run) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1", "run.2"}
    printed = capsys.readouterr().out
    assert "kept the earlier run as" in printed
    assert "trainer.limit_val_batches is 0: nothing was evaluated" in printed


def test_a_run_that_ends_between_two_evaluations_is_evaluated_at_its_end(chain, tmp_path):
    assert chain.run("fit", "rloo", "--trainer.max_steps", "5", run=tmp_path) == 0
    rows = [row for row in rows_of(tmp_path) if row["val/kl"]]
    assert [int(row["step"]) for row in rows] == [0, 3, 5]
    assert final_of(tmp_path)["kl"] == float(rows[-1]["val/kl"]) != float(rows[1]["val/kl"])


def test_a_diverged_run_is_recorded_as_such(chain, tmp_path, capsys):
    extra = ["--model.learning_rate", "1e30", "--trainer.gradient_clip_val", "null"]
    assert chain.run("fit", "sft", *extra, run=tmp_path) == 1
    assert "diverged at step" in capsys.readouterr().err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["state"] == "diverged"
    assert summary["final"] == {}


def test_an_error_that_one_prompt_cannot_give_is_null(chain, tmp_path):
    assert chain.run("fit", "rloo", "--trainer.max_steps", "1", "--data.eval_size", "1", run=tmp_path) == 0
    final = final_of(tmp_path)
    assert final["kl_se"] is None
    assert final["kl"] > 0
