"""Dispatch of the commands, so that `explain` and `export` do not wait for Lightning's import."""

import argparse
import sys
from collections.abc import Sequence

from lit_klrb.errors import ConfigurationError

COMMANDS = ("fit", "validate", "test", "predict", "explain", "export")
# Asked by other programs, not by people: it reads standard input.
CHECK = "check"


def export(argv: Sequence[str]) -> int:
    """`export --ckpt_path FILE --output_dir DIR`."""
    parser = argparse.ArgumentParser("python -m lit_klrb export", description=export.__doc__)
    parser.add_argument("--ckpt_path", required=True, metavar="FILE", help="a checkpoint written by fit")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="the folder to write")
    arguments = parser.parse_args(argv)
    from lit_klrb.models.loading import export_checkpoint

    export_checkpoint(arguments.ckpt_path, arguments.output_dir)
    print(arguments.output_dir)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The command line after the program's name.

    Returns:
        The exit code: 0 done, 2 wrong usage or configuration (one line says what), 1 anything else.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] not in (*COMMANDS, CHECK, "-h", "--help"):
            given = f"{argv[0]} is no command" if argv else "a command is missing"
            raise ConfigurationError(f"{given}; one of {', '.join(COMMANDS)} expected, --help explains them")
        if argv[:1] == ["export"]:
            return export(argv[1:])
        if argv[:1] == ["explain"]:
            from lit_klrb.cli.explain import main as explain

            return explain(argv[1:])
        if argv == [CHECK]:
            from lit_klrb.cli.check import main as check

            return check()
        from lit_klrb.cli.lightning import main as run

        return run(argv)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
