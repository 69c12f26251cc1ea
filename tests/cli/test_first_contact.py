"""What a new user meets: their own data and classes, misspelt keys, and the end of a run."""

import csv
import inspect
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from written import write_rows

from lit_klrb.cli.main import main
from lit_klrb.cli.suggestions import suggestion
from lit_klrb.run.options import RULES

TEXTS = [f"The film was good, number {number}, and more words follow." for number in range(300)]


def refusal(chain, tmp_path, capsys, stage, *extra):
    assert chain.run("fit", stage, *extra, run=tmp_path / "run") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_what_is_suggested_for_an_option_of_the_trainer_is_not_refused():
    known = [f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters]
    for name in ("epochs", "epoch", "num_epochs", "max_epoch", "n_epochs", "me"):
        assert suggestion(f"trainer.{name}", known) == " (did you mean trainer.max_steps?)", name
    words = {word for key in known for word in key.removeprefix("trainer.").split("_")}
    values = (1, 3, 1.0, 0, "00:01:30:00")
    never = {f"trainer.{name}" for name, rule in RULES.items() if not any(map(rule.allows, values))}
    assert "trainer.max_epochs" in never
    for word in ("steps", *words):
        assert not any(f" {name}?" in suggestion(f"trainer.{word}", known) for name in never), word


@pytest.mark.parametrize(("command", "value"), [("fit", ""), ("fit", " "), ("fit", "null"), ("predict", "")])
def test_a_run_directory_has_a_name(tmp_path, capsys, monkeypatch, command, value):
    config = Path("configs/demo/sft.yaml").resolve()
    monkeypatch.chdir(tmp_path)
    assert main([command, "--config", str(config), "--trainer.default_root_dir", value]) == 2
    assert list(tmp_path.iterdir()) == []
    shown = "null" if value == "null" else repr(value)
    expected = f"error: trainer.default_root_dir: must name a directory, such as runs/mine, got {shown}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("name", ["demo", "imdb_small", "imdb"])
def test_the_plan_of_a_sweep_is_not_a_configuration(capsys, name):
    path = f"configs/{name}/sweep.yaml"
    assert main(["fit", "--config", path]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == (f"error: {path} is the plan of a sweep; run it with: lit-klrb sweep --config {path}")


def test_a_folder_without_a_train_split(chain, tmp_path, capsys):
    for name in ("neg", "pos"):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": text} for text in TEXTS[:3]])
    line = refusal(chain, tmp_path, capsys, "rloo", "--data.source", str(tmp_path))
    assert "has no split train; its splits: neg, pos; choose with split, eval_split" in line


def batches(columns):
    return DataLoader([columns] * 8, batch_size=2)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (torch.tensor([1, 2]), "the batches of OtherData are Tensor, but RLOOModule reads dictionaries"),
        ({"input_ids": torch.tensor([1, 2])}, "are dictionaries of input_ids, but RLOOModule reads"),
    ],
)
def test_batches_of_another_kind(chain, tmp_path, capsys, monkeypatch, columns, message):
    module = tmp_path / "other_data.py"
    module.write_text(
        "import lightning as L\n\n\nclass OtherData(L.LightningDataModule):\n"
        "    def train_dataloader(self):\n        return self.loader()\n\n"
        "    val_dataloader = train_dataloader\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import other_data

    monkeypatch.setattr(other_data.OtherData, "loader", lambda self: batches(columns), raising=False)
    line = refusal(chain, tmp_path, capsys, "rloo", "--data", "other_data.OtherData")
    assert message in line
    assert "attention_mask and tokens" in line


def test_given_prompts_are_not_cut_and_a_smaller_evaluation_is_announced(chain, tmp_path, capsys, caplog):
    source = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS])
    extra = ["--data.source", source, "--data.eval_size", "1000", "--trainer.max_steps", "1"]
    logger = ["--trainer.logger+=CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "other")]
    run = tmp_path / "run"
    assert chain.run("fit", "rloo", *extra, *logger, "--trainer.callbacks+=CompletionTable", run=run) == 0
    (warning,) = [record.getMessage() for record in caplog.records if "eval_size" in record.getMessage()]
    assert warning.startswith(f"eval_size is 1000, but the validation split of {source} has ")
    output = capsys.readouterr().out
    export = f"lit-klrb export --ckpt_path {run}/checkpoints/last.ckpt --output_dir {run}/model"
    assert f"wrote {run} (1 steps); to use it elsewhere: {export}\n" in output
    # The table before the first step has one column of texts, and each begins with a whole prompt
    assert output.index("first evaluation") > output.index("step 0: reward")
    assert output.count("step 0: reward") == output.count("step 1: reward") == 1
    with (run / "completions" / "step_000000.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["text"].startswith("The film was good,, and.") for row in rows)  # words it knows
    # A logger of the user's own does not replace the run's metrics
    assert next(run.rglob("attempt_0/metrics.csv")).exists()
    assert next((tmp_path / "other").rglob("metrics.csv")).exists()
    assert CSVLogger.__name__ in (run / "config.yaml").read_text()


@pytest.mark.parametrize(("extra", "says"), [([], False), (["--kl.beta", "0.2"], True)])
def test_ignored_kl_keys_are_mentioned_if_there_are_any(chain, tmp_path, capsys, extra, says):
    assert chain.run("fit", "sft", *extra, "--trainer.max_steps", "1", run=tmp_path / "run") == 0
    assert ("SFTModule uses no KL estimator; ignored: kl\n" in capsys.readouterr().out) == says


def test_after_a_reward_model_comes_the_training_with_it(chain, tmp_path, capsys):
    run = tmp_path / "run"
    assert chain.run("fit", "reward", "--trainer.max_steps", "1", run=run) == 0
    expected = f"to train with this reward: --model.reward_path {run}/checkpoints/last.ckpt\n"
    assert expected in capsys.readouterr().out
