"""Of larger data, rows are drawn at random, as many as a run uses, and a line says how many."""

from types import SimpleNamespace

import pytest
import yaml
from written import write_rows, write_splits

from lit_klrb.data import base
from lit_klrb.data.modules import PreferenceDataModule, PromptDataModule, TextDataModule
from lit_klrb.data.tokenizer import train_bpe
from lit_klrb.errors import ConfigurationError

PAIRS = [{"prompt": f"Is {n} even?", "chosen": "No", "rejected": "Yes"} for n in range(400)]


@pytest.fixture
def source(tmp_path):
    """Prompts for training and evaluation."""
    rows = {
        split: [{"prompt": f"{split} {n}"} for n in range(40)] for split in ("train", "validation", "test")
    }
    return str(write_splits(tmp_path / "prompts", **rows))


def attached(data, steps=2):
    """A data module in a run of some steps."""
    learner = SimpleNamespace(
        tokenizer=train_bpe(["Is 7 even?"], 262), trained=SimpleNamespace(config=None), reads=data.contents
    )
    trainer = {"max_steps": steps, "accumulate_grad_batches": 1, "world_size": 1, "global_step": 0}
    state = SimpleNamespace(fn="fit")
    data.trainer = SimpleNamespace(
        lightning_module=learner, global_rank=0, loggers=(), state=state, sanity_checking=True, **trainer
    )
    return data, learner


def demo(stage):
    with open(f"configs/demo/{stage}.yaml") as file:
        return yaml.safe_load(file)["data"]["init_args"]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [(PreferenceDataModule, "dpo"), (PromptDataModule, "rloo"), (TextDataModule, "sft")],
)
def test_the_demos_number_of_rows_is_that_of_the_embedded_world_alone(tmp_path, kind, stage):
    """open-instruct#1019, unsloth#2904: the first 1,024 rows of a file were used, without a word."""
    own = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"Is {n}", "completion": "No"} for n in range(1200)]
    )
    settings = demo(stage)
    assert settings.pop("generated_size") > 500
    data, _ = attached(kind(**settings, generated_size=70))
    assert len(data.load("train")) == 70
    data, _ = attached(kind(**{**settings, "source": own}))
    assert len(data.load("train")) > 1000


def test_as_many_rows_are_read_as_the_steps_use_and_a_minimum(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(base, "LEAST", 100)
    source = write_rows(tmp_path / "rows.jsonl", [{"text": f"Good {n}."} for n in range(400)])
    for steps, settings, expected, why in (
        (2, {}, 100, "the run's steps use 16"),
        (20, {}, 160, "the run's steps use 160"),
        (2, {"train_size": 30}, 30, "train_size=30"),
    ):
        caplog.clear()
        data, _ = attached(TextDataModule(source=source, batch_size=8, **settings), steps)
        data.setup("fit")
        data.setup("fit")
        rows = data.rows["train"]
        assert len(rows) == len({row.text for row in rows}) == expected
        assert max(int(row.text[5:-1]) for row in rows) > 300, "not the top of the file"
        line = f"{source}: {expected} of 400 rows are read for train, drawn at random ({why})"
        assert caplog.messages.count(line) == 1
    data, _ = attached(TextDataModule(source=source, eval_size=5), steps=10**6)
    assert len(data.load("train")) > 300
    assert len(data.load("validation")) == 5
    assert f"{source}: 5 of 400 rows are read for validation, drawn at random (eval_size=5)" in caplog.text


def test_of_preferences_the_reference_scores_those_that_the_steps_use(tmp_path, source):
    """All are read, and those that cannot be are counted."""
    pairs = write_rows(tmp_path / "pairs.jsonl", [*PAIRS, {**PAIRS[0], "chosen": 5}])
    data, learner = attached(PreferenceDataModule(source=source, preferences=pairs, batch_size=4))
    scored = []
    learner.given_pairs = lambda pairs: scored.append(len(pairs)) or pairs
    data.setup("fit")
    data.train_dataloader()
    assert scored == [8]
    assert data.selections["train"].summary()["rows"] == 401
    assert data.selections["train"].reasons == {"a number as chosen": [f"{pairs} row 401"]}


def test_training_data_are_read_before_the_evaluation(tmp_path, source, monkeypatch):
    """Public report: preferences were refused after the evaluation, which takes minutes."""
    pairs = write_rows(tmp_path / "pairs.jsonl", [{**row, "rejected": "No"} for row in PAIRS])
    data, _ = attached(PreferenceDataModule(source=source, preferences=pairs))
    data.setup("fit")
    monkeypatch.setattr(data, "prompts", lambda split: pytest.fail("the evaluation was read"))
    with pytest.raises(ConfigurationError, match="400 of 400 train rows cannot be read: 400 chosen equals"):
        data.val_dataloader()
    data.trainer.sanity_checking = False
    monkeypatch.undo()
    assert len(data.val_dataloader()) > 0
