"""Files are written to free names and over ordinary files only, and read from ordinary files only."""

import os
import socket
from pathlib import Path

import pytest

from lit_klrb.cli.main import main
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import check_target, local_path, read_regular, write_atomically

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


@pytest.mark.parametrize("name", ODD)
def test_kl_refuses_such_a_page_before_it_measures_anything(odd, capsys, name):
    arguments = ["--policy", "nothing.ckpt", "--reference", "nothing.ckpt", "--texts", "nothing.txt"]
    assert main(["kl", *arguments, "--output", str(odd / name)]) == 2
    assert capsys.readouterr().err.startswith(f"error: output: {odd / name} is a link or not a file")


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
