"""What the wheel installs: commands, and configurations that `init` copies."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import lit_klrb
from analysis.cli.main import main as analysis
from lit_klrb.cli import init
from lit_klrb.cli.main import SWEEPS, main

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Names and metadata of the wheel that `pip install .` builds, from a copy of the checkout."""
    copy, target = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("lit_klrb", "analysis", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(next(target.glob("*.whl"))) as built:
        names = built.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, message_from_string(built.read(metadata).decode())


def test_the_wheel_has_two_packages_and_says_so(wheel):
    names, metadata = wheel
    packages = {name.partition("/")[0] for name in names if ".d" not in name.partition("/")[0]}
    assert packages == {"lit_klrb", "analysis"}
    assert metadata["Summary"].endswith("installs the packages lit_klrb and analysis")
    assert metadata["Version"] == lit_klrb.__version__
    python = {path.relative_to(ROOT).as_posix() for name in packages for path in (ROOT / name).rglob("*.py")}
    assert python <= {*names}
    assert {name for name in names if name.endswith(".j2")}, "templates of reports"


def test_lit_klrb_works_beside_another_package_named_analysis(tmp_path):
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "__init__.py").write_text("raise SystemExit('not ours')")
    run = "from lit_klrb.cli.main import main; sys.exit(main(['explain', 'MonteCarlo']))"
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "MonteCarlo" in done.stdout


@pytest.mark.parametrize("command", [["--version"], ["report", "--help"]])
def test_the_script_runs_every_command_from_a_folder_whose_files_have_our_names(command, tmp_path):
    """`lit-klrb` would import the user's file there."""
    module, _, function = PROJECT["project"]["scripts"]["lit-klrb"].partition(":")
    for shadow in ("analysis", "lit_klrb", "yaml"):
        (tmp_path / f"{shadow}.py").write_text("raise SystemExit('imported from the working directory')")
    script = tmp_path / "bin" / "lit-klrb"
    script.parent.mkdir()
    paths = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script.write_text(f"{paths}from {module} import {function}\nsys.exit({function}())\n")
    done = subprocess.run(
        [sys.executable, script, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("lit_klrb 0", "usage: lit-klrb report"))


@pytest.mark.parametrize("name", SWEEPS)
def test_both_names_of_a_command_run_the_same(name, capsys):
    texts = []
    for run in (main, analysis):
        with pytest.raises(SystemExit):
            run([name, "--help"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"usage: lit-klrb {name}")


def test_the_analysis_prints_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        analysis(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lit_klrb {lit_klrb.__version__}\n"


def test_the_wheel_has_all_configurations():
    listed = PROJECT["tool"]["setuptools"]["data-files"]
    found = {Path(folder) / file.name for folder, (glob,) in listed.items() for file in ROOT.glob(glob)}
    configs = init.SHARED.parent
    files = [path for path in (ROOT / "configs").rglob("*") if path.is_file()]
    assert found == {configs / path.relative_to(ROOT) for path in files}


def test_init_copies_the_configurations_once(tmp_path, capsys):
    assert main(["init", str(tmp_path / "mine")]) == 0
    copied = tmp_path / "mine" / "configs"
    assert f"wrote {copied}; next, in {tmp_path / 'mine'}:" in capsys.readouterr().out
    for source in (ROOT / "configs").rglob("*.yaml"):
        assert (copied / source.relative_to(ROOT / "configs")).read_bytes() == source.read_bytes()
    assert main(["init", str(tmp_path / "mine")]) == 2
    assert f"{copied} exists; name another folder" in capsys.readouterr().err


def test_a_missing_dependency_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lit_klrb.cli.lightning", None)
    with pytest.raises(ModuleNotFoundError):  # a bug of our own keeps its traceback
        main(["fit", "--config", "x.yaml"])
    monkeypatch.delitem(sys.modules, "lit_klrb.cli.lightning")
    monkeypatch.setitem(sys.modules, "lightning", None)
    assert main(["fit", "--config", "x.yaml"]) == 2
    assert (
        "error: fit needs lightning, which is not installed: pip install lit-klrb" in capsys.readouterr().err
    )
