"""A checkpoint is whole whatever is killed and whenever, and a byte that changes in it is found."""

import contextlib
import errno
import io
import os
import random
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from lit_klrb import files
from lit_klrb.errors import ConfigurationError
from lit_klrb.run import checkpoints
from lit_klrb.run.checkpoints import CheckpointFiles, check_intact, damage, digest, read


def content(step):
    generator = torch.Generator().manual_seed(step)
    weights = {"policy.weight": torch.randn(40, 25, generator=generator), "policy.bias": torch.zeros(3)}
    return {"global_step": step, "state_dict": weights}


def save(path, *steps):
    for step in steps:
        CheckpointFiles().save_checkpoint(content(step), path)


def step_of(path):
    loaded = read(path)
    expected = content(loaded["global_step"])["state_dict"]
    assert all(torch.equal(loaded["state_dict"][name], value) for name, value in expected.items())
    return loaded["global_step"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_checkpoint_before_the_newest_is_kept(tmp_path):
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    save(last, 1)
    assert names(tmp_path) == ["last.ckpt"]
    save(last, 2, 3)
    assert names(tmp_path) == ["last.ckpt", "previous.ckpt"]
    assert (step_of(last), step_of(previous)) == (3, 2)


def killed_at(line, action):
    """Run `action` in a process of its own that is gone at the n-th line of the code that writes."""
    ours = {checkpoints.__file__, files.writing.__file__}
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if frame.f_code.co_filename not in ours:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                os._exit(9)
        return trace

    try:
        sys.settrace(trace)
        action()
    finally:
        os._exit(0)


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_kill_at_any_line_leaves_a_whole_checkpoint_to_resume_from(tmp_path, monkeypatch, hard_links):
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    if not hard_links:
        monkeypatch.setattr("os.link", lambda *_: os.stat("/nowhere"))
    line, old, code = 0, 2, 9
    save(last, 1, 2)
    while code == 9:
        line += 1
        code = killed_at(line, partial(save, last, old + 1))
        if hard_links:
            assert step_of(last) in (old, old + 1), line
        # Without hard links there is a moment with `previous.ckpt` alone.
        newest = last if last.exists() else previous
        assert step_of(newest) >= old, line
        assert damage(previous) is None
        save(last, old + 1, old + 2)
        assert (step_of(last), step_of(previous)) == (old + 2, old + 1), line
        old += 2
        files.remove_unfinished(tmp_path.parent, [tmp_path.name])
        assert names(tmp_path) == ["last.ckpt", "previous.ckpt"], line
    assert code == 0
    assert line > 20


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    last = tmp_path / "last.ckpt"
    save(last, 1, 2)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(last, 3)
    monkeypatch.undo()
    assert names(tmp_path) == ["last.ckpt", "previous.ckpt"]
    assert (step_of(last), step_of(tmp_path / "previous.ckpt")) == (2, 1)


@pytest.mark.parametrize("size", [10, 10_000])
def test_torch_does_not_hide_that_a_disk_is_full(size):
    class Full(io.RawIOBase):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        checkpoints._save({"weights": torch.zeros(size)}, Full())


class Calls:
    """What is asked of the operating system, in order: syncs, links and renames, by the file's last name."""

    def __init__(self, monkeypatch):
        self.made = []
        fsync, replace, link = os.fsync, Path.replace, os.link
        monkeypatch.setattr("os.fsync", lambda fd: (self.note_sync(fd), fsync(fd)))
        monkeypatch.setattr("os.link", lambda a, b: (self.note("link", b), link(a, b)))
        monkeypatch.setattr(
            Path, "replace", lambda path, other: (self.note("rename", other), replace(path, other))
        )

    def note_sync(self, descriptor):
        # Content that is still in Python's buffer would not be on disk.
        call = "sync" if os.fstat(descriptor).st_size else "sync of an empty file"
        self.note(call, os.readlink(f"/proc/self/fd/{descriptor}"))

    def note(self, call, path):
        name = os.path.basename(path)
        self.made.append((call, "partial" if name.endswith(".partial") else name))


@pytest.mark.parametrize(
    ("write", "name", "appears"),
    [
        (lambda path: CheckpointFiles().save_checkpoint(content(1), path), "step=1.ckpt", "rename"),
        (lambda path: files.write_atomically(path, b"x"), "summary.json", "rename"),
        (lambda path: files.write_once(path, b"x"), "result.json", "link"),
    ],
)
def test_a_name_appears_after_its_content_is_on_disk_and_is_on_disk_itself(
    tmp_path, monkeypatch, write, name, appears
):
    """What a power cut would show, which a kill does not."""
    calls = Calls(monkeypatch)
    write(tmp_path / name)
    assert calls.made == [("sync", "partial"), (appears, name), ("sync", tmp_path.name)]


def flipped(raw, position, bit):
    changed = bytearray(raw)
    changed[position] ^= 1 << bit
    return bytes(changed)


def test_a_flipped_bit_is_found_wherever_it_changes_anything(tmp_path):
    path = tmp_path / "last.ckpt"
    save(path, 1)
    raw, draw = path.read_bytes(), random.Random(0)
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
    found = []
    positions = [largest.header_offset + 100 + draw.randrange(3_900) for _ in range(50)]
    for position in positions + [draw.randrange(len(raw)) for _ in range(250)]:
        path.write_bytes(flipped(raw, position, draw.randrange(8)))
        found.append(damage(path) is not None)
        if not found[-1]:  # dates and padding, which are not read, and damage that PyTorch detects
            with contextlib.suppress(ConfigurationError):
                assert step_of(path) == 1, position
    assert all(found[:50])


def test_a_torn_checkpoint_is_found_wherever_it_is_torn(tmp_path):
    path = tmp_path / "last.ckpt"
    save(path, 1)
    raw = path.read_bytes()
    for length in range(0, len(raw), 61):
        path.write_bytes(raw[:length])
        assert damage(path) is not None


def test_a_damaged_checkpoint_is_named_with_what_to_resume_from(tmp_path):
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    save(last, 1, 2)
    check_intact(last)
    last.write_bytes(last.read_bytes()[:-5])
    with pytest.raises(ConfigurationError) as refusal:
        CheckpointFiles().load_checkpoint(last)
    assert str(refusal.value) == (
        f"ckpt_path: {last}: not a checkpoint, or a truncated one: File is not a zip file; "
        f"the previous one is intact: {previous}"
    )
    previous.write_bytes(previous.read_bytes()[:-5])
    for path in (last, previous):
        with pytest.raises(ConfigurationError, match=r"^not a checkpoint, or a truncated one: "):
            check_intact(path)


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path):
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"x")
    with pytest.raises(ConfigurationError, match=r"^not a checkpoint: .+") as refusal:
        read(path)
    assert "\n" not in str(refusal.value)
    torch.save([1], path)
    with pytest.raises(ConfigurationError, match=r"^not a checkpoint: it contains a list$"):
        read(path)


def test_checkpoints_of_others_are_read(tmp_path):
    torch.save(content(3), tmp_path / "other.ckpt")
    assert step_of(tmp_path / "other.ckpt") == 3


def test_the_digest_is_of_names_and_bytes():
    weights = content(1)["state_dict"]
    same = {name: value.clone() for name, value in weights.items()}
    assert digest(weights) == digest(same)
    same["policy.bias"][1] = torch.nextafter(torch.tensor(0.0), torch.tensor(1.0))
    assert digest(weights) != digest(same)
    assert digest(weights) != digest({name + "s": value for name, value in weights.items()})
    for dtype in (torch.bfloat16, torch.bool, torch.int64):
        assert len(digest({"x": torch.ones((), dtype=dtype)})) == 64
