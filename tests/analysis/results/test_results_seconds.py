"""Times of cells: what is no time is named in one line, and never rules out a verdict."""

import json
import os

import pytest
from synthetic import digest, write_sweep

from analysis.checks import load_sweep
from analysis.results import layout
from analysis.results.store import read_time

NOT_TIMES = ["", "x", "-1", "0", "nan", "inf", "-inf", "1e10", "1 2", "9" * 10_000, "[1]"]


@pytest.fixture
def runs(tmp_path):
    """A sweep of which every result has a time of 2 seconds."""
    runs = write_sweep(tmp_path, replicates=1, betas={0: 0.1})
    for path in layout.result_paths(runs):
        layout.workdir(runs, path.stem).mkdir(parents=True)
        time_of(runs, path.stem).write_text("2.000")
    return runs


def time_of(runs, name):
    return layout.workdir(runs, name) / layout.SECONDS


def names(runs):
    return [path.stem for path in layout.result_paths(runs)]


def problems(runs):
    found = load_sweep(runs).problems
    assert not any(problem.serious for problem in found)
    return [problem.text for problem in found]


def archived(runs, content):
    """The sweep as published, with this `seconds.json`."""
    lines = [path.read_bytes() for path in layout.result_paths(runs)]
    for path in layout.result_paths(runs):
        path.unlink()
    (runs / "results.jsonl").write_bytes(b"\n".join(lines))
    (runs / "seconds.json").write_text(content)
    return runs


def with_checksum(times):
    return json.dumps({"checksum": digest(times), **times})


def test_times_are_read_by_cell(runs):
    first, *_ = names(runs)
    time_of(runs, first).write_text("3.5")
    assert load_sweep(runs).seconds == dict.fromkeys(names(runs), 2.0) | {first: 3.5}
    assert problems(runs) == []


@pytest.mark.parametrize("content", NOT_TIMES, ids=lambda content: repr(content[:9]))
def test_a_file_without_a_time_is_named(runs, content):
    first, *others = names(runs)
    time_of(runs, first).write_text(content)
    assert problems(runs) == [f"cells/{first}/seconds: not a time from 0.001 to 1e+09 seconds"]
    assert load_sweep(runs).seconds == dict.fromkeys(others, 2.0)


@pytest.mark.parametrize("place", [os.mkdir, lambda path: path.symlink_to(path)])
def test_something_else_than_a_file_is_named(runs, place):
    first, *_ = names(runs)
    time_of(runs, first).unlink()
    place(time_of(runs, first))
    assert problems(runs) == [f"cells/{first}/seconds: not a time from 0.001 to 1e+09 seconds"]
    assert read_time(time_of(runs, first)) is None


def test_a_result_without_a_time_is_no_problem(runs):
    """That of a resumed run is unknown."""
    first, *others = names(runs)
    time_of(runs, first).unlink()
    assert problems(runs) == []
    assert load_sweep(runs).seconds == dict.fromkeys(others, 2.0)


@pytest.mark.parametrize("value", [None, True, "2.0", -1])
def test_a_published_value_that_is_no_time_is_named(runs, value):
    first, *others = names(runs)
    archived(runs, with_checksum(dict.fromkeys(others, 2) | {first: value}))
    (problem,) = problems(runs)
    assert problem.startswith(
        f"seconds.json: not the times of cells with a checksum ({first}: {value!r} is not"
    )
    assert load_sweep(runs).seconds == {}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "3", '{"a": NaN}', "\ufeff", "{}", '{"checksum": "0"}'],
    ids=lambda content: repr(content[:9]),
)
def test_damaged_published_times_are_one_line(runs, content):
    archived(runs, content)
    (problem,) = problems(runs)
    assert problem.startswith("seconds.json: ")
    assert "\n" not in problem
    assert load_sweep(runs).seconds == {}
