"""`validate`, `test` and `predict` load model and tokenizer from the given checkpoint."""

import json
import re

import pytest
from written import write_rows

BPE = ["--model.vocab_size", "280", "--data.overlong", "cut"]


@pytest.fixture(scope="module")
def bpe(chain, tmp_path_factory):
    """A reference with a tokenizer trained in the run."""
    run = tmp_path_factory.mktemp("bpe")
    assert chain.run("fit", "sft", *BPE, run=run) == 0
    return run


@pytest.mark.parametrize("settings", [BPE, BPE[2:]], ids=["the run's settings", "others"])
def test_a_tokenizer_of_its_own(chain, bpe, tmp_path, capsys, settings):
    ckpt = ["--ckpt_path", str(bpe / "checkpoints" / "last.ckpt")]
    final = json.loads((bpe / "summary.json").read_text())["final"]
    assert chain.run("validate", "sft", *settings, *ckpt, run=tmp_path) == 0
    assert f"{final['loss']:.5f}" in capsys.readouterr().out
    assert chain.run("test", "sft", *settings, *ckpt, run=tmp_path) == 0
    assert chain.run("predict", "sft", *settings, *ckpt, run=tmp_path) == 0
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert all(" the " in row["text"] or row["text"][0].isupper() for row in rows)


def test_what_the_policy_started_from_may_be_gone(chain, tmp_path, capsys):
    ckpt = ["--ckpt_path", chain.checkpoint("rloo")]
    assert chain.run("validate", "rloo", *ckpt, run=tmp_path) == 0
    here = capsys.readouterr().out
    assert here.startswith("step 6: reward")
    gone = ["--model.policy_path", str(tmp_path / "gone.ckpt")]
    assert chain.run("validate", "rloo", *ckpt, *gone, run=tmp_path) == 0
    assert capsys.readouterr().out == here


@pytest.mark.parametrize(
    ("prompts", "few", "said"),
    [
        (1, True, r"nats per sequence \(1 prompt[;)]"),
        (9, True, r"nats per sequence \(± standard error, 9 prompts[;)]"),
        (10, False, r"nats per sequence \(± standard error, 10 prompts[;)]"),
    ],
)
def test_standard_errors_name_the_number_of_prompts(chain, tmp_path, capsys, caplog, prompts, few, said):
    data = ["--data.eval_size", str(prompts), "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    assert chain.run("fit", "rloo", *data, run=tmp_path / "run") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.search(said, line)]
    assert len(lines) == 2
    assert all((" ± " in line) == (prompts > 1) for line in lines)
    assert sum("validation.jsonl" in line for line in caplog.messages) == few, "said once"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation_prompts"] == prompts


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_what_measures_training_is_refused(chain, tmp_path, capsys, command):
    extra = ["--ckpt_path", chain.checkpoint("rloo"), "--trainer.callbacks+=EstimationStudy"]
    assert chain.run(command, "rloo", *extra, run=tmp_path) == 2
    line = "trainer.callbacks: EstimationStudy measures training, but this command does not train; use fit"
    assert capsys.readouterr().err.strip().splitlines() == [f"error: {line}"]


def test_a_run_records_hashes_of_the_rows_that_it_read(chain, tmp_path):
    """They depend on the rows alone, not on the seed."""

    def rows(name, source, *extra):
        run = tmp_path / name
        few = ["--data.eval_size", "4", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
        assert chain.run("fit", "rloo", "--data.source", str(source), *few, *extra, run=run) == 0
        return json.loads((run / "summary.json").read_text())["rows_sha256"]

    for name in ("acting", "plot"):
        texts = {"train": ["It was good.", "It was bad."] * 4, "validation": [f"The {name} was good."] * 4}
        for split, lines in texts.items():
            write_rows(tmp_path / f"rows-{name}" / f"{split}.jsonl", ({"text": line} for line in lines))
    first = rows("first", tmp_path / "rows-acting")
    assert first == rows("again", tmp_path / "rows-acting", "--seed_everything", "3")
    second = rows("second", tmp_path / "rows-plot")
    assert {*first} == {"train", "validation"}
    assert second["train"] == first["train"]
    assert second["validation"] != first["validation"]
