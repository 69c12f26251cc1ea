"""All tables of mistakes, the files that they use, and how a mistake is run."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from re import escape

from mistakes.checkpoints import make_checkpoints, wrong_checkpoints
from mistakes.code import make_code, wrong_code
from mistakes.configs import make_configs, wrong_configs
from mistakes.data import make_data, wrong_data
from mistakes.driver import SECONDS, Judgement, Mistake, Verdict, judge
from mistakes.models import make_models, wrong_models
from mistakes.places import make_places, wrong_places
from mistakes.plans import make_plans, wrong_logs, wrong_plans
from mistakes.results import damaged_results, make_sweeps, wrong_results
from mistakes.settings import combinations, commands, out_of_range, wrong_types
from mistakes.strangers import SECONDS as LONGEST, SECRET, make_strangers, strangers

HERE = Path(__file__).parent
TABLES: dict[str, Callable[[], Iterator[Mistake]]] = {
    table.__name__: table
    for table in (
        *(wrong_types, out_of_range, combinations, commands, wrong_data, wrong_configs),
        *(wrong_checkpoints, wrong_models, wrong_places, wrong_code),
        *(wrong_results, damaged_results, wrong_plans, wrong_logs),
    )
}


def make_files(root: Path, finished: Path) -> None:
    """Write all files that mistakes use.

    Args:
        root: A new folder for the files.
        finished: Finished runs, by stage.
    """
    root.mkdir(parents=True)
    make_data(root)
    make_configs(root)
    make_code(root)
    make_places(root)
    make_checkpoints(root, finished)
    make_models(root, finished)
    make_sweeps(root)
    make_plans(root)
    make_strangers(root)


class Desk:
    """The environment of mistakes: their files, finished runs, and a new folder for each.

    Args:
        files: The folder written by `make_files`.
        commands: The command line with other settings than the demo, see `conftest.Commands`.
        scratch: Creates a new folder.
    """

    def __init__(self, files, commands, scratch):
        self.files, self.commands, self.scratch = files, commands, scratch

    def judge(self, mistake: Mistake, seconds: float = SECONDS) -> Judgement:
        """Run a mistake in a new folder and judge how it ends."""
        folder = self.scratch()
        places = {
            "FILES": self.files,
            "CHAIN": self.commands.root,
            "RUN": folder / "run",
            "CASE": folder / "case",
        }

        def placed(text, quote=str):
            return re.sub(r"\b(FILES|CHAIN|RUN|CASE)\b", lambda name: quote(str(places[name[1]])), text)

        argv = [placed(argument) for argument in mistake.argv]
        if mistake.stage is not None:
            argv = self.commands.argv(mistake.command, mistake.stage, *argv, run=folder / "run")

        def run():
            os.chdir(folder)
            sys.path[:0] = [str(self.files), str(HERE)]
            if mistake.program == "analysis":
                from analysis.cli import main
            else:
                from lit_klrb.cli.main import main
            return main(argv)

        if mistake.make is not None:
            return _judge_stranger(mistake, run, folder)
        return judge(mistake._replace(line=mistake.line and placed(mistake.line, escape)), run, seconds)

    def strangers(self, count: int = 40) -> list[Mistake]:
        """The files of strangers, with so many changes of each document."""
        return strangers(self.files, self.commands.root, count)


def _judge_stranger(mistake: Mistake, run: Callable[[], int], folder: Path) -> Judgement:
    """Judge a stranger's file, and whether the home beside it is unchanged and its secret nowhere else."""
    home, case, made = folder / "home", folder / "case", folder / "run"
    for path in (home / "notes", case, made):
        path.mkdir(parents=True)
    (home / "secret.txt").write_text(SECRET)
    (home / "notes" / "one").write_text("mine")
    os.mkfifo(home / "pipe")
    assert mistake.make is not None
    mistake.make(case)
    before = _contents(folder, made)
    judgement = judge(mistake, run, LONGEST)
    after = _contents(folder, made)
    found = [str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    written = [path for path in made.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    if found or written or SECRET in judgement.output:
        return judgement._replace(verdict=Verdict.OUTSIDE, output=f"{found} {written} {judgement.output}")
    return judgement


def _contents(folder: Path, made: Path) -> dict[Path, object]:
    """What is in a folder, except in the one that the command writes."""
    paths = [path for path in folder.rglob("*") if not path.is_relative_to(made)]
    return {path: (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns) for path in paths}
