"""A sweep as a few files to share: its plan, its results in one archive, and its report."""

import lzma
import os
from pathlib import Path

from analysis.checks import load_sweep
from analysis.report.build import build
from analysis.results import DamagedFileError, layout, store
from analysis.stats.text import count
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import write_output
from replication.sections import SECTIONS


def publish(runs_dir: Path, output: Path) -> Path:
    """Copy a complete sweep, without its working directories, and write its report there; return its path.

    Raises:
        ConfigurationError: If a planned run is missing, a file failed a check, a cell gave two results, or
            `output` has another sweep.
        DamagedFileError: If a file cannot be read.
    """
    sweep = load_sweep(runs_dir)
    if sweep.missing:
        raise ConfigurationError(
            f"{runs_dir}: {len(sweep.missing)} planned runs have no result; run the sweep to its end first"
        )
    if sweep.invalid:
        raise ConfigurationError(f"{runs_dir}: {sweep.invalid[0]}")
    refused = list((runs_dir / layout.REFUSED).glob("*.json"))
    if refused:
        raise ConfigurationError(
            f"{runs_dir}: {count(len(refused), 'cell')} gave a second, different result: {layout.REFUSED}/"
        )
    archived = store.archive_lines(runs_dir) if store.has_archive(runs_dir) else ()
    lines = dict(archived) or {path: store.read_bytes(path) for path in layout.result_paths(runs_dir)}
    if broken := [path for path, line in lines.items() if b"\n" in line]:
        raise DamagedFileError(f"{broken[0]}: not a published result")
    content = b"".join(line + b"\n" for line in lines.values())
    archive = store.archive_path(output)
    if layout.result_paths(output) or (archive.exists() and store.read_bytes(archive) != content):
        raise ConfigurationError(f"{output}: contains another sweep; name a new directory", key="--output")
    if os.path.lexists(plan := store.present(runs_dir / layout.PLAN)):
        _write_packed(output / layout.PLAN, store.read_bytes(plan))
    for path in layout.result_paths(runs_dir, layout.FAILED):
        write_output(layout.result_path(output, path.stem, layout.FAILED), store.read_bytes(path))
    _write_packed(output / layout.ARCHIVE, content)
    if sweep.seconds:
        write_output(output / layout.TIMES, store.encode_seconds(sweep.seconds))
    return build(output, added=SECTIONS)


def _write_packed(path: Path, content: bytes) -> None:
    """Write a file compressed, in place of one that is not."""
    write_output(path.with_name(f"{path.name}.xz"), lzma.compress(content))
    path.unlink(missing_ok=True)
