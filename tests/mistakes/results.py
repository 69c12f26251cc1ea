"""Mistakes in the directory of a sweep: damaged files and files of other content."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from re import escape

from mistakes.driver import Mistake
from mistakes.places import KINDS

DEEP = 100_000
# What can lie where a file of JSON should be.
JSON: dict[str, bytes] = {
    "empty": b"",
    "torn": b'{"schema": 2, "content',
    "deep": b"[" * DEEP,
    "infinity": b'{"schema": Infinity}',
    "nan": b'{"schema": NaN}',
    "list": b"[1, 2]",
    "null": b"null",
    "digits": b"1" * 5000,
    "exponent": b'{"schema": 1e999}',
    "latin1": '{"schema": "caf\u00e9"}'.encode("latin-1"),
    "surrogate": b'{"schema": "\\ud800"}',
    "other_schema": b'{"schema": 99}',
    "nothing": b"{}",
}


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**28 + 1)


ODD: dict[str, Callable[[Path], object]] = {
    **KINDS,
    "huge": _huge,
    "device": lambda path: path.symlink_to("/dev/zero"),
}
# What is wrong with one member of a file that is JSON otherwise.
MEMBERS = {"null": None, "text": "text", "mapping": {"a": 1}, "huge": 10**400}
IN_PLAN = ("content", "cells", "history", "content.plan", "content.plan.grid", "content.plan.primary")
# With the exit code of `verify`: cannot be read, differs, or cannot be compared.
IN_REPORT = {"runs": 2, "sections": 1, "comparisons": 1, "arms": 1, "page": 3, "code": 3}
# Copies of the sweep among which ways to damage a result are shared out.
DAMAGED = 8
IN_RESULT = ("cell", "state", "final", "curves", "versions", "final.reward", "cell.beta", "cell.seed")


def make_sweeps(root: Path) -> None:
    """Write a complete sweep with its report, and copies of it with an error each."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))
    from synthetic import write_sweep

    from analysis.report.build import build

    root = root / "sweeps"
    whole = write_sweep(root / "whole", betas={0: 0.1, 1: 0.3}, replicates=4)
    build(whole)
    _damage_documents(root, whole)
    _damage_results(root, whole)
    for name in ("results", "plan.json", "report.html"):
        shutil.copytree(whole, root / f"without_{name}")
        gone = root / f"without_{name}" / name
        (shutil.rmtree if gone.is_dir() else os.unlink)(gone)
    (root / "nothing").mkdir()
    (root / "empty_results" / "results").mkdir(parents=True)


def _damage_documents(root: Path, whole: Path) -> None:
    """Copies with one damaged file each: the plan, the page or its numbers."""
    files = {"plan": "plan.json", "numbers": "results.json", "page": "report.html"}
    for tag, file in files.items():
        for name, content in JSON.items():
            _copy(whole, root / f"{tag}_is_{name}", file).write_bytes(content)
        for name, make in ODD.items():
            make(_copy(whole, root / f"{tag}_is_{name}", file))
    for tag, members in (("plan", IN_PLAN), ("numbers", IN_REPORT)):
        for member in members:
            for name, value in MEMBERS.items():
                target = _copy(whole, root / f"{tag}_{member}_{name}", files[tag])
                document = json.loads((whole / files[tag]).read_bytes())
                target.write_text(json.dumps(changed(document, member, value)))


def _damage_results(root: Path, whole: Path) -> None:
    """Copies with several results damaged in different ways, as each report takes seconds."""
    from synthetic import publish

    def member(place: str, value: object) -> Callable[[Path, dict], object]:
        return lambda path, content: publish(path.parent, changed(content, place, value))

    damages: list[Callable[[Path, dict], object]] = [
        *(lambda path, _, content=content: path.write_bytes(content) for content in JSON.values()),
        *(lambda path, _, make=make: make(path) for make in ODD.values()),
        # There is no checksum of a number that large.
        *(member(place, value) for place in IN_RESULT for name, value in MEMBERS.items() if name != "huge"),
    ]
    for number in range(DAMAGED):
        target = root / f"damaged_{number}"
        shutil.copytree(whole, target)
        paths = sorted((target / "results").iterdir())
        for path, damage in zip(paths, damages[number::DAMAGED], strict=False):
            content = json.loads(path.read_bytes())
            path.unlink()
            damage(path, content)


def _copy(whole: Path, target: Path, file: str) -> Path:
    """A copy of a sweep without one of its files, and the path of that file."""
    shutil.copytree(whole, target)
    (target / file).unlink()
    return target / file


def changed(content: dict, place: str, value: object) -> dict:
    """The content with another value at a dotted key."""
    *above, last = place.split(".")
    parent = content
    for name in above:
        parent = parent[name]
    parent[last] = value
    return content


def analysis_mistake(argv: list[str], line: str | None, code: int | None = None) -> Mistake:
    quick = bool(argv) and argv[-1].endswith(
        ("plan_is_fifo", "numbers_is_deep", "plan_content_text", "grid.replicates_0.yaml")
    )
    return Mistake(argv, line, stage=None, code=code, quick=quick, program="analysis")


def wrong_results() -> Iterator[Mistake]:
    """`report` and `verify` of directories with one error."""
    for name in (*JSON, *ODD):
        yield analysis_mistake(["report", f"FILES/sweeps/plan_is_{name}"], r"plan\.json")
        yield analysis_mistake(["verify", f"FILES/sweeps/numbers_is_{name}"], r"results\.json")
    for name in ODD:
        yield analysis_mistake(["verify", f"FILES/sweeps/page_is_{name}"], r"report\.html")
    for member in IN_PLAN:
        for name in MEMBERS:
            yield analysis_mistake(["report", f"FILES/sweeps/plan_{member}_{name}"], r"plan\.json")
    for argv, line in (
        (["report", "FILES/sweeps/nothing"], r"FILES/sweeps/nothing: no results"),
        (["report", "FILES/sweeps/empty_results"], r"FILES/sweeps/empty_results: no results"),
        (["report", "FILES/sweeps/without_results"], r"FILES/sweeps/without_results: no results"),
        (["report", "FILES/sweeps/without_plan.json"], r"has no plan\.json; the directory of a sweep"),
        (["report", "/no/where"], r"/no/where: no results"),
        (["report", "FILES/a_file"], r"FILES/a_file is not a directory"),
        (["report", "x" * 5000], "xxx"),
        (["report", ""], "results"),
        (["verify", "FILES/sweeps/nothing"], r"FILES/sweeps/nothing: "),
        (["verify", "FILES/sweeps/without_report.html"], r"report\.html"),
        (["verify", "/no/where"], r"/no/where: "),
        (["verify", "FILES/a_file"], r"FILES/a_file: "),
        (["verify", "x" * 5000], "xxx"),
        (["compare", "FILES/sweeps/whole", "FILES/sweeps/nothing"], r"FILES/sweeps/nothing: no results"),
        (["compare", "FILES/sweeps/plan_is_deep", "FILES/sweeps/whole"], r"plan\.json"),
        (["compare", "FILES/sweeps/whole", "FILES/a_file"], r"FILES/a_file: no results"),
        (["compare", "FILES/sweeps/whole"], "DIR|following arguments"),
        (["verify"], "REPORT_OR_DIR"),
        (["report"], "RUNS_DIR"),
        (["nothing"], "nothing"),
        ([], "plan"),
    ):
        yield analysis_mistake(argv, line)
    for place in ("FILES/a_file/x.html", "FILES/sweeps", "FILES/circle.yaml", "FILES/fifo.yaml", "/dev/full"):
        yield analysis_mistake(["report", "FILES/sweeps/whole", "--output", place], escape(place))
    for place in ("/proc/nowhere/x.html", "y" * 300):
        line = escape(place[:100]).removesuffix(r"/x\.html")
        yield analysis_mistake(["report", "FILES/sweeps/whole", "--output", place], line)


def damaged_results() -> Iterator[Mistake]:
    """Damaged results are left out and named in the report; `verify` lists the differences."""
    for number in range(DAMAGED):
        yield analysis_mistake(["report", f"FILES/sweeps/damaged_{number}"], None)
    for member, code in IN_REPORT.items():
        for name in MEMBERS if code == 2 else ("null", "huge"):
            line = r"results\.json|no results" if code == 2 else None
            yield analysis_mistake(["verify", f"FILES/sweeps/numbers_{member}_{name}"], line, code)
