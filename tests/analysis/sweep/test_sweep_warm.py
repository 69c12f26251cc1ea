"""Cells forked from a server with imported libraries compute the same as new processes."""

import json
import os
import subprocess
import sys

from analysis.sweep import warm
from analysis.sweep.launchers.local import WARM

GRID = {"beta": {0: 0.1}, "replicates": 1}
# A module that can answer `check`, once its import has been tried elsewhere, and nothing else.
CHECKS = """
import json, pathlib, sys, time
if sys.argv[1] == "check":
    latest = time.monotonic() + 60
    while time.monotonic() < latest and not pathlib.Path(__file__).with_name("tried").exists():
        time.sleep(0.1)
    assert time.monotonic() < latest, "nobody has imported it"
    print(json.dumps([{"module": "M", "estimator": None, "evaluation": {}} for _ in json.load(sys.stdin)]))
    sys.exit()
"""


def log(project):
    """The first line each cell printed after its command."""
    paths = (project.directory / "plan" / "cells").glob("*/log.txt")
    return [json.loads(path.read_text().splitlines()[1]) for path in paths]


def test_cells_share_one_import_and_equal_a_fresh_process(project):
    plan = project.write(module="warm_job", grid=GRID, threads=2, dpo_threads=1)
    code, output = project.run("sweep", "--config", plan, "--workers", 2, OMP_NUM_THREADS="3")
    assert code == 0, output
    cells = log(project)
    assert len(cells) == 4
    assert all(cell["warm"] for cell in cells)
    assert len({cell["imported_by"] for cell in cells}) == 1
    assert len({cell["pid"] for cell in cells} - {cells[0]["imported_by"]}) == 4

    fresh = {}
    for threads in (1, 2):
        folder = project.directory / f"fresh{threads}"
        folder.mkdir()
        subprocess.run(
            [sys.executable, "-m", "warm_job", "fit", "--trainer.default_root_dir", str(folder)],
            env=project.environment | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        fresh[threads] = json.loads((folder / "summary.json").read_text())["final"]
        assert fresh[threads]["threads"] == threads
    results = [json.loads(content) for content in project.results().values()]
    assert len(results) == 4
    for result in results:
        assert result["final"] == fresh[1 if result["cell"]["stage"] == "dpo" else 2]


def test_an_import_that_fails_during_the_check_is_an_error_of_the_cells_and_not_of_the_server(project):
    package = project.directory / "broken_job"
    (package / "cli").mkdir(parents=True)
    (package / "__init__.py").touch()
    tried = f"import pathlib\npathlib.Path({str(package / 'tried')!r}).touch()\n"
    (package / "cli" / "lightning.py").write_text(f"{tried}raise RuntimeError('broken at import')\n")
    (package / "__main__.py").write_text(f"{CHECKS}\nfrom broken_job.cli import lightning\n")
    plan = project.write(module="broken_job", grid=GRID)
    code, output = project.run("sweep", "--config", plan)
    assert code == 1
    assert "1 failed, 3 blocked" in output
    assert "RuntimeError: broken at import" in output


def test_warming_ignores_all_failures():
    for module in ("no_such_module", ""):
        command = [sys.executable, "-c", f"import {warm.__name__}"]
        subprocess.run(command, env=os.environ | {WARM: f"{os.getpid()} {module}"}, check=True)
