"""Attempts of a cell after an earlier one."""

import errno
import json
import os
import zipfile
from dataclasses import replace

import pytest

from analysis.sweep import Store, job
from analysis.sweep.job import FAILED, MISPLACED, PUBLISHED, Job, misplaced_exit, run_job
from lit_klrb.errors import ConfigurationError


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


def exit_code(store, cell, **settings):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        run_job(Job(cell, store.directory, "fake_job", needs_checkpoint=True, **settings))
    except SystemExit as end:
        os._exit(end.code)
    finally:
        os._exit(99)


def test_an_attempt_resumes_from_the_checkpoint_of_the_previous_one(store, left):
    assert exit_code(store, left) == PUBLISHED
    assert "resumed" in store.log(left.id).read_text()
    assert store.result(left.id)["state"] == "done"


def test_the_time_of_a_resumed_cell_is_unknown(store, left):
    store.seconds(left.id).write_text("5.0")  # of an attempt that was killed before it published
    assert exit_code(store, left) == PUBLISHED
    assert "resumed" in store.log(left.id).read_text()
    assert not store.seconds(left.id).exists()
    # Repeated from the start, it has one
    (store.workdir(left.id) / "summary.json").unlink()
    (store.workdir(left.id) / "checkpoints" / "last.ckpt").unlink()
    assert exit_code(store, left) == PUBLISHED
    assert 0 < float(store.seconds(left.id).read_text()) < 60


def test_a_checkpoint_is_on_disk_before_its_result_is_published(store, left, monkeypatch, tmp_path):
    order = tmp_path / "order.txt"

    def noted(name, original):
        def call(*arguments):
            with order.open("a") as file:
                print(name, file=file)
            return original(*arguments)

        return call

    monkeypatch.setattr(job, "sync", noted("sync", job.sync))
    monkeypatch.setattr(Store, "publish", noted("publish", Store.publish))
    assert exit_code(store, left) == PUBLISHED
    assert order.read_text().split() == ["sync", "publish"]


def test_a_repeated_published_cell_starts_from_scratch(store, left):
    assert exit_code(store, left) == PUBLISHED
    workdir = store.workdir(left.id)
    (workdir / "summary.json").unlink()
    (workdir / "checkpoints" / "last.ckpt").write_bytes(b"step 1")
    assert exit_code(store, left) == PUBLISHED
    assert "resumed" not in store.log(left.id).read_text()
    assert (workdir / "checkpoints" / "last.ckpt").read_bytes() != b"step 1"
    assert not (store.directory / "refused").exists()


def test_a_resumed_cell_that_fails_for_an_outside_reason_keeps_its_checkpoint(store, left, monkeypatch):
    monkeypatch.setenv("FAKE_JOB", "crash")
    checkpoint = store.workdir(left.id) / "checkpoints" / "last.ckpt"
    with zipfile.ZipFile(checkpoint, "w") as archive:
        archive.writestr("step", "0")
    content = checkpoint.read_bytes()
    assert exit_code(store, left) == FAILED
    assert checkpoint.read_bytes() == content


def test_a_cell_has_the_environment_of_the_sweep(store, cells, monkeypatch):
    """A node may have another value, or one where the sweep has none."""
    monkeypatch.setenv("FAKE_JOB", "crash")
    assert exit_code(store, cells[0], environment={"FAKE_JOB": None}) == PUBLISHED
    assert exit_code(store, cells[1], environment={"FAKE_JOB": "noise"}) == PUBLISHED
    assert all(store.result(cell.id)["final"]["reward"] // 1 == noise for noise, cell in enumerate(cells[:2]))


def test_a_machine_without_the_directory_is_named(store, cells):
    job = Job(cells[0], store.directory, "fake_job", False, token=store.token(create=True))
    assert misplaced_exit(job) is None
    code, reason = misplaced_exit(replace(job, directory=store.directory / "elsewhere"))
    assert (code, "which all machines must share" in reason) == (MISPLACED, True)


def test_a_directory_without_hard_links_is_refused_at_the_start(store, monkeypatch):
    def refused(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(ConfigurationError, match="has no hard links, with which results are published"):
        store.token(create=True)


def test_a_failed_attempt_does_not_use_the_previous_attempts_end(store, left, monkeypatch):
    monkeypatch.setenv("FAKE_JOB", "crash")
    assert exit_code(store, left) == FAILED
    assert store.result(left.id) is None
    assert not (store.workdir(left.id) / "checkpoints" / "last.ckpt").exists()
