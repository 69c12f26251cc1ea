"""The code that ids and reports depend on: what `fit` imports, and what `report` imports."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.design.fingerprint import environment, import_closure

ROOT = Path(__file__).parents[3]
# Files -> the hashes that a line added to each of them changes
CHANGED = {
    "lit_klrb/estimators/recipe.py": "cell",
    "lit_klrb/callbacks/predictions.py": "cell",
    "lit_klrb/data/__init__.py": "cell",
    "lit_klrb/schema.py": "cell report",
    "analysis/stats/comparison.py": "report",
    "analysis/report/templates/report.css": "report",
    "analysis/results/rules.py": "report",
    "lit_klrb/cli/explain.py lit_klrb/cli/kl.py lit_klrb/cli/init.py lit_klrb/cli/main.py "
    "lit_klrb/comparison/measure.py analysis/sweep/store.py": "",
}
# Prints, for the files of each argument, the hashes that an added line changes
PROGRAM = """
import json, sys
from pathlib import Path
from analysis.design.cells import expand
from analysis.design.plan_file import read_plan
from analysis.report.build import code_version

def hashes():
    code_version.cache_clear()
    cells = expand(read_plan(Path("configs/demo/sweep.yaml"))).cells
    return {"cell": [cell.id for cell in cells], "report": code_version()["sources"]}

before, changed = hashes(), {}
for names in sys.argv[1:]:
    sources = {Path(name): Path(name).read_text() for name in names.split()}
    for path, source in sources.items():
        path.write_text(source + "\\nX = 1\\n")
    after = hashes()
    changed[names] = " ".join(key for key in before if after[key] != before[key])
    for path, source in sources.items():
        path.write_text(source)
assert hashes() == before
print(json.dumps(changed))
"""


def test_ids_and_reports_depend_on_the_code_that_makes_them_and_on_no_other(tmp_path):
    for name in ("lit_klrb", "analysis", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *CHANGED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == CHANGED


def test_fit_imports_nothing_of_ours_outside_its_closure():
    code = "import json, sys, lit_klrb.cli.lightning; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, cwd=ROOT)
    loaded = json.loads(done.stdout)
    assert "peft" not in loaded, "which an adapter alone needs"
    loaded = {name for name in loaded if name.partition(".")[0] in ("lit_klrb", "analysis")}
    assert len(loaded) > 50
    assert loaded <= import_closure(["lit_klrb.cli.lightning"]).keys()


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_imports_are_followed_inside_functions_packages_and_our_own(project):
    package = project / "followed"
    (package / "deep").mkdir(parents=True)
    (package / "deep" / "__init__.py").write_text("from lit_klrb import errors")
    (package / "__init__.py").write_text("")
    (package / "start.py").write_text("import json, numpy\ndef f():\n    from .deep.end import g")
    (package / "deep" / "end.py").write_text("from .. import other as one\nfrom ..other import *")
    (package / "other.py").write_text("")
    (package / "alone.py").write_text("import followed.start")
    found = import_closure(["followed.start", "nowhere.to", "be.found"])
    own = {"followed", "followed.start", "followed.deep", "followed.deep.end", "followed.other"}
    assert found.keys() == own | {"lit_klrb", "lit_klrb.errors"}


def test_classes_of_the_users_own_count_and_installed_ones_do_not(project):
    (project / "my_estimators.py").write_text("import my_helpers")
    (project / "my_helpers.py").write_text("")
    named = {"kl": [{"class_path": "my_estimators.Mine"}], "optimizer": "torch.optim.AdamW"}

    def code(configs):
        return environment("lit_klrb", 1, configs=configs)["code"]

    without, before = code({"optimizer": "torch.optim.AdamW"}), code(named)
    assert code({}) == without != before
    (project / "my_helpers.py").write_text("X = 1")
    assert code(named) == before  # of another package, which the user's may or may not be part of
    (project / "my_estimators.py").write_text("X = 1")
    assert code(named) != before
    assert code({"model": {"reward": "my_estimators:mine"}}) == code(named)
