"""`python -m lit_klrb clean`: removes files that can be recomputed."""

from collections.abc import Sequence
from pathlib import Path

from lit_klrb import schema, sweep_files
from lit_klrb.cli.arguments import Arguments
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import local_path


def main(argv: Sequence[str]) -> int:
    """Run `clean [RUNS_DIR ...]` and return the exit code.

    Args:
        argv: The command line after `clean`.

    Raises:
        ConfigurationError: If a directory is not that of a sweep; then nothing is removed.
    """
    parser = Arguments("python -m lit_klrb clean", description=__doc__)
    parser.add_argument(
        "sweeps",
        nargs="*",
        type=local_path,
        metavar="RUNS_DIR",
        help="remove checkpoints, metrics and studies of this sweep's published cells, except results and "
        "checkpoints that other cells start from (default: empty the cache)",
    )
    sweeps: list[Path] = parser.parse_args(argv).sweeps
    for sweep in sweeps:
        if not (sweep / schema.CELLS).is_dir() or not (sweep / schema.RESULTS).is_dir():
            raise ConfigurationError(
                f"{sweep} is not the directory of a sweep: it has no {schema.CELLS}/ and {schema.RESULTS}/"
            )
        sweep_files.check_no_links(sweep)
    for sweep in sweeps:
        _print_removed(sweep, *sweep_files.trim(sweep, limit=0))
    if not sweeps:
        # Imported here as it imports torch
        from lit_klrb.run.cache import clear, default_folder

        _print_removed(default_folder(), *clear())
    return 0


def _print_removed(place: Path, files: int, size: int) -> None:
    print(f"removed {files} files, {size / 1e6:.1f} MB, from {place}")
