"""Mistakes in settings: wrong types, values out of range, options without effect."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from re import escape

from mistakes.driver import Mistake

# One key of each type, with values of other types: all types are checked in one place.
TYPES = [
    ("rloo", "model.init_args", "completions_per_prompt", ("many", "1.5", "[1]")),
    ("rloo", "trainer", "max_steps", ("many", "1.5", "[1]")),
    ("rloo", "kl", "beta", ("much", "[1]", "")),
    ("rloo", "kl.estimator.init_args", "clip_range", ("much", "[1]", "")),
    ("rloo", "model.init_args", "stop_at_eos", ("maybe", "2")),
    ("rloo", "data.init_args", "source", ("[1, 2]",)),
    ("rloo", "model.init_args", "schedule", ("x",)),
    ("rloo", "kl.estimator.init_args", "baseline", ("x",)),
    ("rloo", "trainer", "precision", ("x",)),
]
# Numbers out of range, as YAML writes them.
NOT_POSITIVE = ("0", "-1", ".nan", ".inf")
NEGATIVE = ("-1", ".nan", ".inf")
POSITIVE_NUMBERS = [
    ("rloo", "model.init_args", "learning_rate temperature"),
    ("rloo", "kl", "target_kl"),
    ("rloo", "kl.estimator.init_args", "clip_range"),
    ("dpo", "model.init_args", "beta"),
]
NUMBERS_FROM_ZERO = [
    ("rloo", "model.init_args", "weight_decay adam_epsilon missing_eos_penalty"),
    ("rloo", "kl", "beta final_beta"),
    ("rloo", "trainer", "gradient_clip_val"),
]
POSITIVE_INTEGERS = [
    ("rloo", "model.init_args", "completions_per_prompt max_new_tokens evaluation_completions"),
    ("rloo", "model.init_args", "inner_epochs mini_batches"),
    ("rloo", "data.init_args", "batch_size eval_size eval_batch_size min_prompt_tokens"),
    ("rloo", "kl", "horizon"),
    ("sft", "data.init_args", "max_tokens"),
    ("sft", "model.init_args", "vocab_size"),
    ("rloo", "trainer", "max_steps accumulate_grad_batches check_val_every_n_epoch"),
]
INTEGERS_FROM_ZERO = [
    ("rloo", "model.init_args", "warmup_steps"),
    ("rloo", "data.init_args", "train_size"),
    ("rloo", "trainer", "log_every_n_steps"),
]


def _keys(table: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Stage, place and name of each key of a table."""
    for stage, place, names in table:
        for name in names.split():
            yield stage, place, name


def _option(place: str, name: str, value: str) -> list[str]:
    return [f"--{place.removesuffix('.init_args')}.{name}={value}"]


def wrong_types() -> Iterator[Mistake]:
    """Keys with values of other types; the error names key and value."""
    for stage, place, name, values in TYPES:
        for value in values:
            line = rf"^error: {escape(place)}\.{name}: .*{escape(value)}.* is not (of type|one of) "
            yield Mistake(_option(place, name, value), line, stage)


def out_of_range() -> Iterator[Mistake]:
    """Every number with values out of its range; the error names key, range and value."""
    for table, values in (
        (POSITIVE_NUMBERS, NOT_POSITIVE),
        (NUMBERS_FROM_ZERO, NEGATIVE),
        (POSITIVE_INTEGERS, ("0", "-1")),
        (INTEGERS_FROM_ZERO, ("-1",)),
    ):
        for stage, place, name in _keys(table):
            for value in values:
                line = rf"^error: {escape(place)}\.{name}:? must .*{escape(value.lstrip('.'))}"
                yield Mistake(_option(place, name, value), line, stage)


def combinations() -> Iterator[Mistake]:
    """Settings that exclude each other, and trainer options that are not supported."""
    for text, line, quick in read_table("settings.txt"):
        stage, *argv = text
        yield Mistake(argv, line, stage, quick=quick)


def commands() -> Iterator[Mistake]:
    """Complete command lines."""
    for argv, line, quick in read_table("commands.txt"):
        yield Mistake(argv, line, stage=None, quick=quick)


def read_table(name: str) -> Iterator[tuple[list[str], str | None, bool]]:
    """Rows `arguments => line`: arguments, pattern of the error (None for `fine`), whether quick."""
    for row in (Path(__file__).parent / name).read_text("utf-8").splitlines():
        if row and not row.startswith("#"):
            arguments, line = row.removeprefix("! ").split("=> ")
            argv = shlex.split(arguments.replace("{", "'{").replace("}", "}'"))
            yield argv, None if line == "fine" else line, row.startswith("! ")
