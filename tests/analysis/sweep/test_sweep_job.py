"""What a cell's process does with what an earlier attempt left."""

import json
import os

import pytest

from analysis.sweep import Store
from analysis.sweep.job import FAILED, PUBLISHED, Job, run_job

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def store(project):
    return Store(project.directory / "plan")


@pytest.fixture
def left(store, cells):
    """A cell whose earlier attempt saved a checkpoint and diverged, but was killed before it published."""
    workdir = store.workdir(cells[0].id)
    (workdir / "checkpoints").mkdir(parents=True)
    (workdir / "checkpoints" / "last.ckpt").write_bytes(b"step 0")
    (workdir / "summary.json").write_text(json.dumps({"state": "diverged", "final": {}, "versions": {}}))
    return cells[0]


def exit_code(store, cell):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        run_job(Job(cell, store.directory, "fake_job", needs_checkpoint=True))
    except SystemExit as end:
        os._exit(end.code)
    finally:
        os._exit(99)


def test_an_attempt_goes_on_from_the_checkpoint_of_the_one_before(store, left):
    assert exit_code(store, left) == PUBLISHED
    assert "resumed" in store.log(left.id).read_text()
    assert store.result(left.id)["state"] == "done"


def test_a_published_cell_that_is_repeated_starts_anew(store, left):
    assert exit_code(store, left) == PUBLISHED
    workdir = store.workdir(left.id)
    (workdir / "summary.json").unlink()
    (workdir / "checkpoints" / "last.ckpt").write_bytes(b"step 1")
    assert exit_code(store, left) == PUBLISHED
    assert "resumed" not in store.log(left.id).read_text()
    assert (workdir / "checkpoints" / "last.ckpt").read_bytes() != b"step 1"
    assert store.refused(left.id) is None


def test_an_attempt_that_fails_does_not_end_as_the_one_before_did(store, left, monkeypatch):
    monkeypatch.setenv("FAKE_JOB", "crash")
    assert exit_code(store, left) == FAILED
    assert store.result(left.id) is None
    assert not (store.workdir(left.id) / "checkpoints" / "last.ckpt").exists()
