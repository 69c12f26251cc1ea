"""Files are written to free names and over ordinary files only, and read from ordinary files only."""

import errno
import os
import socket
from pathlib import Path

import pytest

from lit_klrb.cli.main import main
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import check_target, local_path, new_folder, read_regular, write_atomically

ODD = ["pipe", "socket", "folder", "link", "broken_link", "circle"]


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """What is no ordinary file: a device needs root to be made, and a socket is as little a file."""
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for name, target in {"link": "file", "broken_link": "nowhere", "circle": "circle"}.items():
        (tmp_path / name).symlink_to(target)
    return tmp_path


@pytest.mark.parametrize("name", ODD)
def test_nothing_but_an_ordinary_file_is_replaced(odd, name):
    before = os.lstat(odd / name)
    for refuse in (check_target, lambda path: write_atomically(path, "ours")):
        with pytest.raises(ConfigurationError, match=f"{name} is a link or not a file"):
            refuse(odd / name)
    assert os.path.samestat(before, os.lstat(odd / name))
    assert (odd / "file").read_text() == "mine"
    write_atomically(odd / "file", "ours")
    assert (odd / "file").read_text() == "ours"


def test_devices_pipes_and_large_files_are_not_read(odd):
    for path in (odd / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigurationError, match="is not a regular file"):
            read_regular(path)
    assert read_regular(odd / "link") == b"mine"
    with pytest.raises(ConfigurationError, match="has 4 bytes; at most 3 are read"):
        read_regular(odd / "file", 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\0b", "null character"),
        ("s3://bucket/run", "is an address"),
        ("~no-such-user/run", "there is no such user"),
    ],
)
def test_a_path_is_of_this_machine(text, reason):
    with pytest.raises(ConfigurationError, match=f"output: .*{reason}"):
        local_path(text, "output")


def killed_in_new_folder(target, earlier):
    """The hidden folder of a process that died with its lock, before or after it moved an earlier folder."""
    process = os.fork()
    if process == 0:
        with new_folder(target, replace=True) as partial:
            if earlier:
                target.rename(partial.parent / "earlier")
            (partial / "config.json").write_text("{}")
            os._exit(0)
    os.waitpid(process, 0)
    (left,) = target.parent.glob(f".{target.name}.*/unfinished")
    return left.parent


def test_nothing_is_removed_that_this_package_did_not_mark(tmp_path):
    """A folder of the user with digits in its name, one without the mark, and a link to a marked one."""
    left = killed_in_new_folder(tmp_path / "models", earlier=False)
    moved = left.rename(tmp_path / "elsewhere")
    (tmp_path / ".models.link").symlink_to(moved)
    for name in (".models.2023", ".models.99999999", ".models.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "unfinished").write_text("notes\n")
    before = sorted(tmp_path.rglob("*"))
    with new_folder(tmp_path / "models"):
        pass
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "models"])


def test_only_a_folder_whose_lock_is_free_is_removed(tmp_path):
    left = killed_in_new_folder(tmp_path / "model", earlier=False)
    with new_folder(tmp_path / "model") as first, new_folder(tmp_path / "model") as second:
        assert first != second
        assert first.is_dir()
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_kill_between_two_moves_loses_nothing(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("old")
    killed_in_new_folder(tmp_path / "model", earlier=True)
    assert not (tmp_path / "model").exists()
    with pytest.raises(OSError, match="full"), new_folder(tmp_path / "model", replace=True):
        raise OSError("full")
    assert (tmp_path / "model" / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_name_that_is_too_long_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").touch()
    long = "a" * 300
    for command in (
        ["init", long],
        ["import-gguf", "model.gguf", "--output_dir", long],
        ["import-gguf", f"{long}.gguf", "--output_dir", "out"],
        ["export", "--ckpt_path", f"{long}.ckpt", "--output_dir", "out"],
    ):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("File name too long")


@pytest.mark.parametrize(
    "full", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left (os error 28)")]
)
def test_a_full_disk_is_not_blamed_on_the_file(tmp_path, monkeypatch, capsys, full):
    def fail(*_):
        raise full

    monkeypatch.chdir(tmp_path)
    Path("model.gguf").touch()
    monkeypatch.setattr("lit_klrb.models.gguf.import_gguf", fail)
    assert main(["import-gguf", "model.gguf", "--output_dir", "out"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: No space left")
