"""A sweep removes only working files that can be recomputed, above a limit."""

import json
import os

import pytest

from analysis.sweep.store import trim

SHARED, GRID, OLD, RUNNING = "shared", "grid", "old", "running"


@pytest.fixture
def sweep(tmp_path):
    """A stage that others start from, cells of the grid, and one that has no result yet."""
    records = {SHARED: {"arm": None}, OLD: {"arm": "RaoBlackwell"}, GRID: {"arm": "MonteCarlo"}}
    (tmp_path / "results").mkdir()
    for age, name in enumerate([*records, RUNNING]):
        cell = tmp_path / "cells" / name
        for path in ("checkpoints/last.ckpt", "checkpoints/previous.ckpt", "metrics/attempt_0/metrics.csv"):
            (cell / path).parent.mkdir(parents=True, exist_ok=True)
            (cell / path).write_bytes(bytes(100))
        for path in ("run.json", "log.txt", "seconds", "config.yaml", "summary.json"):
            (cell / path).write_text(path)
        if name in records:
            result = tmp_path / "results" / f"{name}.json"
            result.write_text(json.dumps({"cell": records[name]}))
            os.utime(result, (1000 + age, 1000 + age))
    (tmp_path / SHARED).symlink_to(tmp_path / "cells" / SHARED)
    return tmp_path


def heavy(sweep, name):
    """Files in a cell's folders."""
    cell = sweep / "cells" / name
    return sorted(str(path.relative_to(cell)) for path in cell.rglob("*/*") if path.is_file())


def test_what_published_cells_no_longer_need_is_removed(sweep):
    before = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()}
    unfinished = heavy(sweep, RUNNING)
    trim(sweep, 0)
    assert heavy(sweep, SHARED) == ["checkpoints/last.ckpt"]
    assert heavy(sweep, GRID) == heavy(sweep, OLD) == []
    assert heavy(sweep, RUNNING) == unfinished
    assert len(unfinished) == 3
    after = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()}
    assert after.items() <= before.items()
    assert sorted(path.name for path in (sweep / "cells" / GRID).iterdir()) == sorted(
        ["run.json", "log.txt", "seconds", "config.yaml", "summary.json"]
    )


def test_the_limit_takes_the_oldest_results_first(sweep):
    left = []
    for limit in (800, 650, 599):
        trim(sweep, limit)
        left.append([len(heavy(sweep, name)) for name in (SHARED, OLD, GRID)])
    assert left == [[3, 3, 3], [1, 3, 3], [1, 0, 3]]  # the shared stage keeps its checkpoint


def test_a_running_cell_is_left_alone(sweep):
    import fcntl

    descriptor = os.open(sweep / "cells" / GRID, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    trim(sweep, 0)
    assert [len(heavy(sweep, name)) for name in (OLD, GRID)] == [0, 3]
    os.close(descriptor)
    trim(sweep, 0)
    assert heavy(sweep, GRID) == []


def test_links_are_removed_and_not_followed(sweep, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    elsewhere.write_text("mine")
    folder = sweep / "cells" / GRID / "checkpoints"
    (folder / "link").symlink_to(elsewhere)
    (folder / "folder").symlink_to(elsewhere.parent)
    trim(sweep, 0)
    assert elsewhere.read_text() == "mine"


@pytest.mark.parametrize("link", ["cells", "results", "cells/linked"])
def test_nothing_is_removed_through_a_link(sweep, tmp_path_factory, link):
    """`cells -> ../home`, with a result named as a directory there, once removed that directory."""
    home = tmp_path_factory.mktemp("home")
    (home / GRID / "photographs").mkdir(parents=True)
    (home / GRID / "photographs" / "one").write_text("mine")
    if (sweep / link).exists():
        (sweep / link).rename(sweep / "aside")
    (sweep / link).symlink_to(home / GRID if "/" in link else home)
    (sweep / "results" / "linked.json").write_text(json.dumps({"cell": {"arm": "MonteCarlo"}}))
    trim(sweep, 0)
    assert (home / GRID / "photographs" / "one").read_text() == "mine"


@pytest.mark.parametrize("name", [".", ".."])
def test_a_result_names_no_directory_above(sweep, name):
    (sweep / "results" / f"{name}.json").write_text(json.dumps({"cell": {"arm": "MonteCarlo"}}))
    unfinished = heavy(sweep, RUNNING)
    trim(sweep, 0)
    assert heavy(sweep, RUNNING) == unfinished
    assert (sweep / "results" / f"{GRID}.json").exists()


def test_results_that_cannot_be_read_keep_their_checkpoints(sweep):
    """A pipe is not waited for."""
    (sweep / "results" / f"{OLD}.json").write_text("{")
    (sweep / "results" / f"{GRID}.json").unlink()
    os.mkfifo(sweep / "results" / f"{GRID}.json")
    (sweep / "results" / "lost.json").symlink_to("nowhere")
    trim(sweep, 0)
    assert heavy(sweep, OLD) == heavy(sweep, GRID) == ["checkpoints/last.ckpt"]
