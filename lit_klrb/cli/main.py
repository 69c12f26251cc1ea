"""Dispatch of the commands. Lightning is imported only by commands that need it."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from lit_klrb import __version__
from lit_klrb.cli.help import short_help
from lit_klrb.errors import ConfigurationError, brief, error_line, is_exhausted
from lit_klrb.extensions import COMMANDS as ADDED, extensions, load
from lit_klrb.stops import Stopped, Stops
from lit_klrb.terminal import say_loading

COMMANDS = {
    "fit": "train a model and write a run directory",
    "validate": "evaluate a checkpoint on the validation prompts",
    "test": "evaluate a checkpoint on the test prompts",
    "predict": "complete prompts with a checkpoint, and write predictions.jsonl with reward and KL",
    "check": "say what fit would train, without training",
    "explain": "show what a KL estimator computes and what its gradient optimises",
    "certify": "find out which known gradient a KL loss of your own has",
    "export": "write a checkpoint as a folder that transformers loads",
    "kl": "estimate the KL of two given models, with its error",
    "import-gguf": "write a GGUF file as a folder that transformers loads",
    "init": "copy the configurations that come with the package",
}
# Commands of the package `analysis`, which is not imported before one of them runs
SWEEPS = {
    "plan": "say what a sweep compares, its cells, time and power",
    "sweep": "run what is missing of a sweep; safe to kill and to repeat",
    "report": "write the HTML report of a sweep or of a run, and results.json",
    "verify": "recompute every number of a report from its results",
    "import": "import runs of other software as a sweep",
    "compare": "compare two sweeps, unpaired",
}
# Commands of Lightning; every other command is the module of its name in this folder
RUNS = ("fit", "validate", "test", "predict")
# What the others import, where that takes seconds
SLOW = {
    **dict.fromkeys(("explain", "certify"), "torch"),
    **dict.fromkeys(("check", "export", "kl", "import-gguf"), "Lightning and transformers"),
}
# Packages that `pip install --no-deps` beside torch leaves out, for the message about one
DEPENDENCIES = {"lightning", "transformers", "datasets", "omegaconf", "jsonargparse", "yaml", "numpy", "rich"}
# What the libraries in Rust raise, which is no Exception: a pattern of a tokenizer can take too many steps.
PANIC = "PanicException"
HELP = """usage: lit-klrb COMMAND [--help] ...

Fine-tune language models with a KL penalty whose estimates and gradients are correct.

commands (also as lit-klrb COMMAND):
{commands}

sweeps over arms, betas and seeds:
{sweeps}

The stages of training, on an embedded world of film reviews:
  lit-klrb fit --config configs/demo/sft.yaml   the reference
  lit-klrb fit --config configs/demo/dpo.yaml   the warm start
  lit-klrb fit --config configs/demo/rloo.yaml  RLOO; --kl.estimator and --kl.beta set the penalty

exit codes: 0 done, 2 wrong usage or configuration, 69 a server or a judge that does not answer, 130 and 143
stopped by Ctrl-C or SIGTERM, 1 anything else
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code; see `HELP`."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if command in SWEEPS:
        code: int = import_module("analysis.cli.main").main([command, *rest])
        return code
    try:
        with Stops():
            return _run(command, rest)
    except Stopped as stop:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return 0  # where one of several processes fails, Lightning kills the first
        notes = [*getattr(stop, "__notes__", []), *filter(None, [stop.requeued()])]
        print("; ".join([str(stop), *notes]), file=sys.stderr)
        return stop.exit_code
    except BaseException as error:
        missing = str(getattr(error, "name", None) or "").partition(".")[0]
        code = 1 if is_exhausted(error) else 2
        if isinstance(error, ConfigurationError):
            line = str(error)
        elif isinstance(error, ModuleNotFoundError) and missing in DEPENDENCIES:
            line = f"{command} needs {missing}, which is not installed: pip install lit-klrb"
        elif isinstance(error, OSError) and error.strerror:
            line = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        elif code == 1:
            line = brief(error)
        elif type(error).__name__ == PANIC:
            line = f"a tokenizer cannot be used: its library fails ({error})"
        else:
            raise
        print(error_line(line), file=sys.stderr)
        return code


def console() -> int:
    """The installed command `lit-klrb`, which finds modules of the user's own in the working directory.

    They come last, in the processes that it starts too: no file of the user's, such as analysis.py, can take
    the place of an installed package.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path.append(str(Path.cwd()))
    return main()


def _run(command: str, rest: list[str]) -> int:
    if command in ("-h", "--help"):
        return printing(lambda: print(_help(), end=""))
    if command == "--version":
        return printing(lambda: print(f"lit_klrb {__version__}"))
    added = extensions(ADDED)
    if command in added and command not in COMMANDS | SWEEPS:
        return printing(lambda: load(added[command])(rest))
    help_only = bool({"-h", "--help"} & {*rest})
    if command not in COMMANDS:
        problem = f"unknown command {command}" if command else "a command is missing"
        raise ConfigurationError(
            f"{problem}; one of {', '.join([*COMMANDS, *SWEEPS, *added])} expected, --help explains them"
        )
    if command not in RUNS:
        if (libraries := SLOW.get(command)) and not help_only:
            say_loading(f"loading {libraries}")
        module = import_module(f"lit_klrb.cli.{command.replace('-', '_')}")
        return printing(lambda: module.main(rest))
    if help_only:
        return printing(lambda: print(short_help(command, COMMANDS[command]), end=""))
    say_loading("loading Lightning and transformers")
    from lit_klrb.cli.lightning import main as run

    every = ["--help" if word == "--help-all" else word for word in rest]
    return run([command, *every]) if every == rest else printing(lambda: run([command, *every]))


def _help() -> str:
    """The help of the program, with the commands that other packages add."""
    added = {name: f"added by {entry.value}" for name, entry in extensions(ADDED).items()}
    commands, sweeps = (
        "\n".join(f"  {name:<12}{does}" for name, does in table.items())
        for table in (COMMANDS | added, SWEEPS)
    )
    return HELP.format(commands=commands, sweeps=sweeps)


def printing(command: Callable[[], int | None]) -> int:
    """Run a command that prints; a closed pipe (`| head`) ends it without an error message."""
    try:
        try:
            code = command()
        finally:  # after --help too, which exits
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again at exit, which would print an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0
