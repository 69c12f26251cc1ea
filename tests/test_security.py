"""tests/security.md: each line has a test, and code is imported by name in known places only."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "security.md"
FILES = sorted(path for package in ("lit_klrb", "analysis") for path in (ROOT / package).rglob("*.py"))

# Functions and modules that import, unpickle or run what a text names.
BUILTINS = {"eval", "exec", "__import__"}
METHODS = {"import_module", "run_path", "run_module", "system", "popen", "unsafe_load", "full_load"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PLACES = {
    # reward_path: "package.module:function", and what `explain` and `certify` are given
    "lit_klrb/reward_functions.py": {"import_module"},
    "lit_klrb/cli/main.py": {"import_module"},  # our own command of that name
    "lit_klrb/run/checkpoints.py": {"pickle"},  # the name of its error
    "lit_klrb/integrations/trl_checkpoints.py": {"pickle"},  # the name of its error
    "lit_klrb/cli/setting_types.py": {"import_module"},  # classes that a configuration names
    "lit_klrb/models/sharding.py": {"pickle"},  # what the first process of a run makes, for the others
    "analysis/sweep/launchers/slurm.py": {"pickle"},  # a job in the script that the sweep itself wrote
    "analysis/sweep/launchers/ray.py": {"pickle"},  # a job of the sweep itself, which Ray would pickle too
    "analysis/sweep/warm.py": {"import_module"},  # the sweep's own job
    "analysis/sweep/job.py": {"run_module"},  # the module that a plan names
}


def nodes_of(path):
    return ast.walk(ast.parse(path.read_text("utf-8")))


def reached(path):
    """The names above that a file calls or imports."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from {node.func.id} & (BUILTINS | METHODS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from {node.func.attr} & METHODS
        elif isinstance(node, ast.Import):
            yield from {alias.name.partition(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").partition(".")[0]} & MODULES


def test_code_is_reached_by_name_in_known_places_only():
    found = {str(path.relative_to(ROOT)): set(reached(path)) for path in FILES}
    assert {name: names for name, names in found.items() if names} == PLACES


def test_torch_reads_tensors_only():
    """Every torch.load passes weights_only=True, regardless of the environment."""
    calls = [
        node
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    for call in calls:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("weights_only") == "True", ast.unparse(call)


def test_every_line_of_the_page_names_tests_that_exist():
    known = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
    }
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| ---", "| What", "| Where"))]
    assert len(rows) > 20
    for row in rows:
        named = set(re.findall(r"`(test_\w+)`", row))
        assert named, f"no test: {row}"
        assert named <= known, named - known
