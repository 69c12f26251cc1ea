"""Writes the report: the page and its numbers."""

import datetime
import functools
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from analysis.design.fingerprint import code_hash
from analysis.report.assessment import Assessment, load_assessment
from analysis.report.html import render
from analysis.report.numbers import summary_numbers
from analysis.report.sections import Builder, sections_of
from analysis.results.layout import NUMBERS, NUMBERS_SCHEMA, REPORT
from analysis.results.store import digest
from lit_klrb.files import check_target, write_output

# Libraries of which another version can change drawings or, by more than rounding, numbers.
_ENGINES = ("numpy", "scipy", "moocore", "matplotlib")
# Key of `results.json` with the checksum of the rest of it.
CHECKSUM = "checksum"
# Significant digits of the numbers.
_DIGITS = 12


@dataclass(frozen=True)
class Report:
    """A report before it is written.

    Attributes:
        page: The HTML page.
        numbers: The content of `results.json`.
    """

    page: bytes
    numbers: dict[str, Any]


def build(runs_dir: Path, output: Path | None = None, added: Sequence[Builder] = ()) -> Path:
    """Write the report of a sweep and `results.json` beside it.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: If the directory has no results, or the page cannot be written.
        DamagedFileError: If the plan cannot be read.
    """
    return write(load_assessment(runs_dir), output, added)


def write(assessment: Assessment, output: Path | None = None, added: Sequence[Builder] = ()) -> Path:
    """Write the report of an assessed sweep, as `build`."""
    output = assessment.sweep.directory / REPORT if output is None else output
    numbers = output.parent / NUMBERS
    for path in (output, numbers):
        check_target(path)
    report = compose(assessment, output, added, made_here())
    write_output(output, report.page)
    content = json.dumps(report.numbers, separators=(",", ":"), ensure_ascii=False)
    write_output(numbers, content.encode() + b"\n")
    return output


def made_here() -> dict[str, str]:
    """Day and machine, which the page names."""
    host, cores = platform.uname(), os.cpu_count() or 1
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{host.system}, {host.machine}, {cores} core{'s' * (cores > 1)}",
    }


def compose(
    assessment: Assessment, output: Path, added: Sequence[Builder] = (), made: Mapping[str, str] | None = None
) -> Report:
    """Compose the report of a sweep."""
    made = dict(made or {})
    parts = sections_of(assessment, added)
    page = render(assessment, parts, made).encode()
    numbers: dict[str, Any] = _plain(
        {
            "schema": NUMBERS_SCHEMA,
            "runs": os.path.relpath(assessment.sweep.directory, output.parent),
            "page": {"name": output.name, "sha256": hashlib.sha256(page).hexdigest()},
            "code": code_version(tuple(added)),
            "engines": engines(),
            "made": made,
            **summary_numbers(assessment),
            "sections": {
                section.name: section.numbers for sections in parts.values() for section in sections
            },
        }
    )
    return Report(page, {**numbers, CHECKSUM: checksum_of(numbers)})


def checksum_of(numbers: dict[str, Any]) -> str:
    """The checksum of the content of `results.json`, which shows that it was edited by hand."""
    return digest({key: value for key, value in numbers.items() if key != CHECKSUM})


@functools.cache  # the sources do not change under a running process
def code_version(added: tuple[Builder, ...] = ()) -> dict[str, str]:
    """The version of the code that makes a report: its number and the hash of its sources."""
    modules = sorted({builder.__module__ for builder in added})
    return {"version": version("lit-klrb"), "sources": code_hash(__name__, *modules)}


def engines() -> dict[str, str]:
    """Versions of the libraries for computations and drawings."""
    return {name: version(name) for name in _ENGINES}


def _plain(value: Any) -> Any:
    """Cut floats to the digits that `verify` compares; NaN and infinities are not JSON and become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
