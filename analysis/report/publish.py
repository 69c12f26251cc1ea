"""Copies a sweep into a directory for publication: plan, results in one file, times, and its report."""

import lzma
import os
from pathlib import Path

from analysis.report.build import build
from analysis.report.sections import added_sections
from analysis.results import layout
from analysis.results.store import (
    DamagedFileError,
    archive_lines,
    archive_path,
    encode_seconds,
    has_archive,
    present,
    read_bytes,
)
from analysis.results.sweep import load_sweep
from analysis.stats.text import count
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import write_output


def publish(runs_dir: Path, output: Path) -> Path:
    """Copy a complete sweep, without its working directories, and write its report there.

    Returns:
        The path of the page.

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
    lines = dict(archive_lines(runs_dir)) if has_archive(runs_dir) else _lines(runs_dir)
    content = b"".join(line + b"\n" for line in lines.values())
    archive = archive_path(output)
    if layout.result_paths(output) or (archive.exists() and read_bytes(archive) != content):
        raise ConfigurationError(f"{output}: contains another sweep; name a new directory", key="--output")
    if os.path.lexists(plan := present(runs_dir / layout.PLAN)):
        _write_packed(output / layout.PLAN, read_bytes(plan))
    for path in layout.result_paths(runs_dir, layout.FAILED):
        write_output(layout.result_path(output, path.stem, layout.FAILED), read_bytes(path))
    _write_packed(output / layout.ARCHIVE, content)
    if sweep.seconds:
        write_output(output / layout.TIMES, encode_seconds(sweep.seconds))
    return build(output, added=added_sections())


def _lines(runs_dir: Path) -> dict[Path, bytes]:
    """The content of the single results, which have no line breaks."""
    lines = {path: read_bytes(path) for path in layout.result_paths(runs_dir)}
    for path, line in lines.items():
        if b"\n" in line:
            raise DamagedFileError(f"{path}: not a published result")
    return lines


def _write_packed(path: Path, content: bytes) -> None:
    """Write a file compressed, in place of one that is not."""
    write_output(path.with_name(f"{path.name}.xz"), lzma.compress(content))
    path.unlink(missing_ok=True)
