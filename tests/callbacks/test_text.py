"""Completions are displayed and stored as plain text, whatever they contain."""

import csv
import io
import json
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from rich.cells import cell_len
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lit_klrb.callbacks import CompletionTable, PredictionWriter
from lit_klrb.cli.command_line import check_text
from lit_klrb.errors import ConfigurationError, error_line, printable
from lit_klrb.files import csv_text
from lit_klrb.models.rollout import Rollout
from lit_klrb.run.loggers import run_loggers
from lit_klrb.terminal import text_table

HOSTILE = [
    "good [/i] film",
    "[bold red]x[/]",
    "[link=file:///etc/passwd]x[/link]",
    ":smile: :warning:",
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m\x7f\x00",
    "\u202egnirts\u2066",
    "\U0001f3fb",
    "<script>alert(1)</script>&amp;\"'",
    "]]><!--",
    "=HYPERLINK(1)",
    'a\rb\r\nc\nd,"e"',
    "\u2028line\u2029",
    "\u200dzwj",
    "a ${",
    "\ud800",
    "",
]
TEXTS = st.text(max_size=60) | st.sampled_from(HOSTILE) | st.lists(st.sampled_from(HOSTILE)).map("".join)
fast = settings(max_examples=150, deadline=None)


def hostile(test):
    for text in HOSTILE:
        test = example(text)(test)
    return fast(given(TEXTS)(test))


def steers(text):
    return any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in "\u202e\u2066" for c in text)


@hostile
def test_in_a_terminal(text):
    out = io.StringIO()
    Console(file=out, width=2000, force_terminal=True, color_system="truecolor").print(
        text_table([text], [[text, 0.5]])
    )
    shown = out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")  # the header's own style
    assert not steers(shown.replace("\n", ""))
    for line in printable(text, keep="\n").expandtabs(8).split("\n"):
        # A column of characters without a width of their own, such as a lone skin tone, has no cells.
        assert line.strip() in shown or not cell_len(line.strip())


@hostile
def test_in_tensorboard(text):
    """TensorBoard gets names and values of settings as text; invalid text is refused before a run starts."""
    if not is_text(text):
        with pytest.raises(ConfigurationError, match="is not text"):
            check_text({"model.init_args.reward_path": text})
        text = text.encode(errors="replace").decode().replace("\0", "")
    check_text({"model.init_args.reward_path": text, text: 1})
    with TemporaryDirectory() as folder:
        _, board = run_loggers(Path(folder))
        board.log_hyperparams({"reward_path": text, f"x{text}": 0.5})
        board.log_metrics({"train/kl": 0.25}, step=3)
        board.save()
        (file,) = Path(folder).rglob("events.out.tfevents.*")
        events = list(EventFileLoader(str(file)).Load())
        board.finalize("success")
    values = [value for event in events for value in event.summary.value]
    assert [value.tensor.float_val[0] for value in values if value.tag == "train/kl"] == [0.25]
    (start,) = (value for value in values if value.tag == "_hparams_/session_start_info")
    content = HParamsPluginData.FromString(start.metadata.plugin_data.content)
    settings = content.session_start_info.hparams
    assert settings["reward_path"].string_value == text
    assert settings[f"x{text}"].number_value == 0.5


def is_text(text):
    return "\0" not in text and not any(unicodedata.category(c) == "Cs" for c in text)


@hostile
def test_in_a_csv_file(text):
    rows = [["first", "reward"], [text, 0.5], [text * 2, -1.0]]
    written = csv_text(rows[0], rows[1:], csv.QUOTE_NONNUMERIC)
    assert list(csv.reader(io.StringIO(written, newline=""), quoting=csv.QUOTE_NONNUMERIC)) == rows


@hostile
def test_in_an_error(text):
    line = error_line(ConfigurationError(f"the text {text} is wrong", key="reward_path"))
    assert line.startswith("error: reward_path: the text ")
    assert not steers(line)


class Module:
    """A module whose pair of models has completions with a given text."""

    def __init__(self, text):
        self.pair = SimpleNamespace(texts=lambda rollout: [text] * len(rollout.mask))


@pytest.mark.parametrize("text", [text for text in HOSTILE if text != "\ud800"], ids=ascii)
def test_a_run_goes_on_whatever_a_completion_says(tmp_path, capsys, text):
    trainer = SimpleNamespace(
        global_step=3, state=SimpleNamespace(fn=None), is_global_zero=True, default_root_dir=str(tmp_path)
    )
    rollout = Rollout(*[torch.ones(4, 3)] * 3)
    evaluation = SimpleNamespace(completions_per_prompt=2, rollout=rollout, rewards=torch.ones(4))
    CompletionTable().report(trainer, Module(text), [evaluation], "val")
    with (tmp_path / "completions" / "step_000003.csv").open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == [text, text]
    writer = PredictionWriter(tmp_path)
    writer.on_predict_batch_end(trainer, None, [{"text": text, "reward": 1.0}], None, 0)
    writer.on_predict_end(trainer, None)
    (line,) = (tmp_path / "predictions.jsonl").read_text("utf-8").split("\n")[:-1]
    assert json.loads(line) == {"text": text, "reward": 1.0}
    assert not steers(capsys.readouterr().out.replace("\n", ""))
