"""What sdist and wheel install: commands, and configurations that `init` copies."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import lit_klrb
from analysis.cli.main import main as analysis
from lit_klrb.cli import init
from lit_klrb.cli.main import SWEEPS, main

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def run(*words, **options):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a copy of the checkout, unpacked, and the wheel made of that, as by `python -m build`."""
    copy, target = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, copy)
    for name in ("lit_klrb", "analysis", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_{}({!r})"
    run(sys.executable, "-c", build.format("sdist", str(target)), cwd=copy)
    (sdist,) = target.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    unpacked = target / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-c", build.format("wheel", str(target)), cwd=unpacked)
    (wheel,) = target.glob("*.whl")
    return unpacked, wheel


@pytest.fixture(scope="module")
def wheel(built):
    """Names and metadata of the wheel."""
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, message_from_string(archive.read(metadata).decode())


def test_the_wheel_of_the_sdist_works_in_an_empty_environment(built, tmp_path):
    """Of which only the dependencies are those of the test's environment."""
    unpacked, wheel = built
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE"} <= {path.name for path in unpacked.iterdir()}
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (packages,) = tmp_path.glob("env/lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    script, clean = python.with_name("lit-klrb"), {"PATH": str(python.parent)}
    assert run(script, "--version", cwd=tmp_path, env=clean) == f"lit_klrb {lit_klrb.__version__}\n"
    run(script, "init", "work", cwd=tmp_path, env=clean)
    config = "configs/demo/sft.yaml"
    assert (tmp_path / "work" / config).read_bytes() == (ROOT / config).read_bytes()
    where = "import lit_klrb, analysis.report; print(lit_klrb.__file__)"
    assert str(packages) in run(python, "-c", where, cwd=tmp_path, env=clean)
    said = run(script, "check", "--config", config, cwd=tmp_path / "work", env=clean)
    assert "SFTModule" in said


def test_the_wheel_has_two_packages_and_says_so(wheel):
    names, metadata = wheel
    packages = {name.partition("/")[0] for name in names if ".d" not in name.partition("/")[0]}
    assert packages == {"lit_klrb", "analysis"}
    assert metadata["Summary"].endswith("installs the packages lit_klrb and analysis")
    assert metadata["Version"] == lit_klrb.__version__
    python = {path.relative_to(ROOT).as_posix() for name in packages for path in (ROOT / name).rglob("*.py")}
    assert python <= {*names}
    assert {name for name in names if name.endswith(".j2")}, "templates of reports"
    assert metadata["License-Expression"] == "MIT"
    links = {entry.partition(",")[0] for entry in metadata.get_all("Project-URL")}
    assert links >= {"Documentation", "Source", "Changelog", "Issues"}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == lit_klrb.__version__
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{cited['version']}] - {cited['date-released']}" in changes


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
