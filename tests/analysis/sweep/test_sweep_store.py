"""Publication, claims and checks of the store, with kills and full disks at any time."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from analysis.results import DamagedFileError
from analysis.results.store import read_result
from analysis.sweep import Store
from lit_klrb import files
from lit_klrb.files import PARTIAL, write_once

ID = "a" * 64
RESULT = {"schema": 1, "id": ID, "cell": {"stage": "sft"}, "state": "done", "final": {"reward": 0.25}}


def in_child(action):
    """Run `action` in a forked process and return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def test_a_published_result_is_read_back_and_is_canonical(store):
    assert store.result(ID) is None
    assert store.publish(RESULT)
    content = store.result(ID)
    assert {key: content[key] for key in RESULT} == RESULT
    raw = (store.results / f"{ID}.json").read_text()
    assert raw == json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert len(list(store.results.iterdir())) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(os, "fsync"), (os, "link"), (Path, "unlink"), (files.writing, "sync")],
    ids=lambda x: str(x),
)
def test_a_kill_at_any_step_leaves_a_complete_result_or_none(store, monkeypatch, owner, name, moment):
    real = getattr(owner, name)

    def killed(*args, **kwargs):
        if moment == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(owner, name, killed)

    def publish():
        with store.claim(ID):
            store.publish(RESULT)

    status = in_child(publish)
    monkeypatch.undo()
    assert os.WTERMSIG(status) == signal.SIGKILL

    early = (name, moment) in {("fsync", "before"), ("fsync", "after"), ("link", "before")}
    assert (store.result(ID) is None) == early
    assert store.publish(RESULT)
    assert store.result(ID)["final"] == RESULT["final"]
    store.tidy()
    assert [path.name for path in store.results.iterdir()] == [f"{ID}.json"]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (os, "link")])
def test_a_full_disk_publishes_nothing_and_leaves_nothing(store, monkeypatch, owner, name):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match="No space left"):
        store.publish(RESULT)
    monkeypatch.undo()
    assert not list(store.results.iterdir())
    assert store.publish(RESULT)


def test_one_of_many_writers_wins(store):
    store.results.mkdir(parents=True)
    path = store.results / "contested"
    pids = []
    for writer in range(8):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if write_once(path, b"%d" % writer * 100_000) else 3)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sorted(codes) == [0, *[3] * 7]
    assert path.read_bytes() == b"%d" % codes.index(0) * 100_000


def test_an_equal_duplicate_is_ignored_and_a_different_one_kept_separately(store):
    store.publish(RESULT)
    first = (store.results / f"{ID}.json").read_bytes()
    assert store.publish(RESULT)
    refused = store.directory / "refused" / f"{ID}.json"
    assert not refused.exists()
    assert not store.publish({**RESULT, "final": {"reward": 0.5}})
    assert (store.results / f"{ID}.json").read_bytes() == first
    assert read_result(refused)["final"] == {"reward": 0.5}


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.replace(b"0.25", b"0.26"),
        lambda raw: raw.replace(b'"done"', b'"diverged"'),
        lambda raw: raw.replace(b",", b", ", 1),
        lambda raw: raw[:-1],
        lambda raw: b"",
        lambda raw: b"[]",
        lambda raw: b'{"checksum":1}',
    ],
)
def test_a_changed_result_is_refused_and_named(store, change):
    store.publish(RESULT)
    path = store.results / f"{ID}.json"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DamagedFileError, match=f"{ID}.json: (does not match its checksum|cannot be read)"):
        store.result(ID)


def test_a_claim_excludes_others_and_ends_with_its_process(store):
    ready, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        with store.claim(ID) as claimed:
            os.write(held, b"y" if claimed else b"n")
            signal.pause()
    assert os.read(ready, 1) == b"y"
    assert store.is_claimed(ID)
    with store.claim(ID) as claimed:
        assert not claimed
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not store.is_claimed(ID)
    with store.claim(ID) as claimed:
        assert claimed
        assert store.is_claimed(ID)
    assert not store.is_claimed(ID)


def test_clearing_a_claimed_cell_keeps_the_claim(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    with store.claim(ID):
        workdir = store.workdir(ID)
        (workdir / "checkpoints").mkdir()
        (workdir / "checkpoints" / "last.ckpt").touch()
        (workdir / "link").symlink_to(outside)
        store.clear(ID)
        assert not list(workdir.iterdir())
        assert store.is_claimed(ID)
    assert (outside / "file").exists()


def test_tidying_keeps_the_file_of_a_running_publication(store):
    store.results.mkdir(parents=True)
    mine = store.results / f".{ID}.json.0123{PARTIAL}"
    mine.touch()
    with store.claim(ID):
        store.tidy()
        assert mine.exists()
    store.tidy()
    assert not mine.exists()


def test_failures_are_counted_until_there_is_a_result(store):
    store.record_failure(ID, {"stage": "sft"}, "first")
    store.record_failure(ID, {"stage": "sft"}, "second")
    assert store.failure(ID) == {"id": ID, "cell": {"stage": "sft"}, "attempts": 2, "error": "second"}
    store.publish(RESULT)
    assert store.failure(ID) is None
    assert not list((store.directory / "failed").iterdir())


def test_a_settled_cell_has_a_result_and_any_checkpoint_that_others_need(store):
    assert not store.is_settled(ID, needs_checkpoint=False)
    store.publish(RESULT)
    assert store.is_settled(ID, needs_checkpoint=False)
    assert not store.is_settled(ID, needs_checkpoint=True)
    checkpoint = store.workdir(ID) / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    # Without a summary, it is that of a repetition that was stopped.
    assert not store.is_settled(ID, needs_checkpoint=True)
    (store.workdir(ID) / "summary.json").touch()
    assert store.is_settled(ID, needs_checkpoint=True)
    # A divergence is final: no checkpoint will come of running it again.
    other = {**RESULT, "id": "b" * 64, "state": "diverged"}
    store.publish(other)
    assert store.is_settled("b" * 64, needs_checkpoint=True)
