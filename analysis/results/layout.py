"""Names of the files of a sweep.

RUNS/plan.json            the locked plan and its history; plan.json.xz where a sweep was published
RUNS/results/<id>.json    published results: immutable, with a checksum
RUNS/results.jsonl.xz     the same results in one file, where a sweep was published; or .gz, or plain
RUNS/seconds.json         wall times of its cells, where a sweep was published and they are known
RUNS/refused/<id>.json    a second result of the same cell that differs from the published one
RUNS/failed/<id>.json     cells that ended without a result, with the end of their log
RUNS/cells/<id>/          working directories: stage.yaml, log.txt, seconds (unless it was resumed), the run
RUNS/report.html          the report
RUNS/results.json         its numbers
"""

from pathlib import Path

PLAN = "plan.json"
RESULTS = "results"
ARCHIVE = "results.jsonl"
TIMES = "seconds.json"
REFUSED = "refused"
FAILED = "failed"
CELLS = "cells"
STAGE = "stage.yaml"
LOG = "log.txt"
SECONDS = "seconds"
REPORT = "report.html"
NUMBERS = "results.json"

# Version numbers of the file formats. Readers refuse unknown ones.
RESULT_SCHEMA = 1
PLAN_SCHEMA = 2
NUMBERS_SCHEMA = 2


def result_path(directory: Path, cell_id: str, folder: str = RESULTS) -> Path:
    """The path of a cell's published result, or of its record in FAILED or REFUSED."""
    return directory / folder / f"{cell_id}.json"


def result_paths(directory: Path, folder: str = RESULTS) -> list[Path]:
    """The paths of all published results, or of all records in FAILED, sorted by id."""
    return sorted((directory / folder).glob("*.json"))


def workdir(directory: Path, cell_id: str) -> Path:
    """The working directory of a cell."""
    return directory / CELLS / cell_id
