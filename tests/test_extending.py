"""Every example of docs/extending.md works as written."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from lit_klrb.cli.main import main

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text("utf-8")
FILES = {match[1]: match[0] for match in re.finditer(r"# (my_\w+\.py)\n.*?(?=```)", PAGE, re.DOTALL)}
# As an installer writes them
ENTRY_POINTS = [
    f"[{group}]\n{name} = {value}"
    for group, name, value in re.findall(
        r'^\[project.entry-points."(.+)"\]\n(\S+) = "(.+)"$', PAGE, re.MULTILINE
    )
    if group.startswith("lit_klrb.")
]
COMMANDS = [
    line.removeprefix("python -m lit_klrb ")
    for line in re.findall(r"^python -m lit_klrb .*$", PAGE, re.MULTILINE)
]


@pytest.fixture(autouse=True)
def extensions(tmp_path, monkeypatch):
    """The files of the page, importable during a test."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, "utf-8")
    installed = tmp_path / "my_package-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: my-package\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("\n".join(ENTRY_POINTS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"^python (my_\w+\.py)$", PAGE, re.MULTILINE):
        runpy.run_path(name, run_name="__main__")
    yield
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(chain, tmp_path, capsys, command):
    kind, *arguments = shlex.split(command)
    if kind == "explain":
        assert main([kind, *arguments]) == 0
        assert "c_t = r_t + sum_{s>t} KL_s" in capsys.readouterr().out
        return
    if kind == "count":
        assert main([kind, *arguments]) == 0
        assert capsys.readouterr().out == f"{len(FILES['my_commands.py'].split())}\n"
        assert main(["--help"]) == 0
        assert "count       added by my_commands:count" in capsys.readouterr().out
        return
    assert arguments[:2] == ["--config", "configs/demo/rloo.yaml"]
    assert chain.run("fit", "rloo", *arguments[2:], run=tmp_path / "run") == 0
    if "LengthStudy" in command:
        assert (tmp_path / "run" / "studies" / "length.json").exists()
