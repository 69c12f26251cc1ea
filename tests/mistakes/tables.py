"""All mistakes, the files that they use, and how one is run."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from re import escape

from mistakes.configs import make_configs, wrong_configs
from mistakes.driver import Mistake, judge

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
# Numbers out of range, as YAML writes them: the values, and the keys of each place.
RANGES: list[tuple[tuple[str, ...], str, str, str]] = [
    (("0", "-1", ".nan", ".inf"), "rloo", "model.init_args", "learning_rate temperature"),
    (("0", "-1", ".nan", ".inf"), "rloo", "kl", "target_kl"),
    (("0", "-1", ".nan", ".inf"), "rloo", "kl.estimator.init_args", "clip_range"),
    (("0", "-1", ".nan", ".inf"), "dpo", "model.init_args", "beta"),
    (("-1", ".nan", ".inf"), "rloo", "model.init_args", "weight_decay adam_epsilon missing_eos_penalty"),
    (("-1", ".nan", ".inf"), "rloo", "kl", "beta final_beta"),
    (("-1", ".nan", ".inf"), "rloo", "trainer", "gradient_clip_val"),
    (("0", "-1"), "rloo", "model.init_args", "completions_per_prompt max_new_tokens evaluation_completions"),
    (("0", "-1"), "rloo", "model.init_args", "inner_epochs mini_batches"),
    (("0", "-1"), "rloo", "data.init_args", "batch_size eval_size eval_batch_size min_prompt_tokens"),
    (("0", "-1"), "rloo", "kl", "horizon"),
    (("0", "-1"), "sft", "data.init_args", "max_tokens"),
    (("0", "-1"), "sft", "model.init_args", "vocab_size"),
    (("0", "-1"), "rloo", "trainer", "max_steps accumulate_grad_batches check_val_every_n_epoch"),
    (("-1",), "rloo", "model.init_args", "warmup_steps"),
    (("-1",), "rloo", "data.init_args", "train_size"),
    (("-1",), "rloo", "trainer", "log_every_n_steps"),
]


def mistakes() -> Iterator[Mistake]:
    """All mistakes, those of settings.txt and commands.txt first."""
    for (stage, *argv), line, quick in _rows("settings.txt"):
        yield Mistake(argv, line, stage, quick)
    for argv, line, quick in _rows("commands.txt"):
        yield Mistake(argv, line, None, quick)
    for stage, place, name, values in TYPES:
        for value in values:
            line = rf"^error: {escape(place)}\.{name}: .*{escape(value)}.* is not (of type|one of) "
            yield Mistake(_option(place, name, value), line, stage)
    for values, stage, place, names in RANGES:
        for name in names.split():
            for value in values:
                line = rf"^error: {escape(place)}\.{name}:? must .*{escape(value.lstrip('.'))}"
                yield Mistake(_option(place, name, value), line, stage)
    yield from wrong_configs()


def _option(place: str, name: str, value: str) -> list[str]:
    return [f"--{place.removesuffix('.init_args')}.{name}={value}"]


def _rows(name: str) -> Iterator[tuple[list[str], str | None, bool]]:
    """Rows `arguments => line`: arguments, pattern of the error (None for `fine`), whether quick."""
    for row in (Path(__file__).parent / name).read_text("utf-8").splitlines():
        if row and not row.startswith("#"):
            arguments, line = row.removeprefix("! ").split("=> ")
            argv = shlex.split(arguments.replace("{", "'{").replace("}", "}'"))
            yield argv, None if line == "fine" else line, row.startswith("! ")


class Desk:
    """The environment of mistakes: their files, finished runs, and a new folder for each.

    Args:
        files: A new folder for their files.
        commands: The command line with other settings than the demo, see `conftest.Commands`.
        scratch: Creates a new folder.
    """

    def __init__(self, files, commands, scratch):
        self.files, self.commands, self.scratch = files, commands, scratch
        make_configs(files)
        (files / "a_file").write_text("a file\n")

    def complaint(self, mistake: Mistake) -> str:
        """Run a mistake in a new folder; "" if it ends as it should."""
        folder = self.scratch()
        places = {"FILES": self.files, "CHAIN": self.commands.root, "RUN": folder / "run"}

        def placed(text, quote=str):
            return re.sub(r"\b(FILES|CHAIN|RUN)\b", lambda name: quote(str(places[name[1]])), text)

        argv = [placed(argument) for argument in mistake.argv]
        if mistake.stage is not None:
            argv = self.commands.argv("fit", mistake.stage, *argv, run=folder / "run")

        def run():
            os.chdir(folder)
            from lit_klrb.cli.main import main

            return main(argv)

        wrong, output = judge(mistake._replace(line=mistake.line and placed(mistake.line, escape)), run)
        return wrong and f"{wrong}; got:\n{output}"
