"""`functional`, `estimators` and the losses for Tinker where nothing but torch is installed."""

import re
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROGRAM = """
import doctest, importlib.util, pkgutil, sys
import lit_klrb.estimators, lit_klrb.functional, lit_klrb.integrations.tinker

for name in ("numpy", "lightning", "transformers", "scipy", "rich"):
    assert importlib.util.find_spec(name) is None, name

for room in (lit_klrb.functional, lit_klrb.estimators):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
example = doctest.DocTestParser().get_doctest(sys.stdin.read(), {}, "loop.md", "loop.md", 0)
assert len(example.examples) > 5
sys.exit(doctest.DocTestRunner().run(example).failed)
"""


def with_dependencies(name, found):
    """The installed distribution called `name` and those it declares to need, extras aside."""
    if name not in found:
        found[name] = distribution(name)
        for requirement in map(Requirement, found[name].requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                with_dependencies(requirement.name, found)
    return found.values()


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory):
    """Python with torch and what it needs, and this package without its dependencies."""
    environment = tmp_path_factory.mktemp("torch_alone")
    venv.create(environment, with_pip=False)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # Several distributions of CUDA have parts of one folder
    places = {
        path.parts[0]: found.locate_file(path.parts[0])
        for found in with_dependencies("torch", {})
        for path in found.files
        if path.parts[0] not in ("..", "__pycache__")
    }
    for name, place in places.items():
        (site_packages / name).symlink_to(place)
    (site_packages / "lit_klrb").symlink_to(ROOT / "lit_klrb")
    return environment / "bin" / "python"


def test_everything_imports_and_the_example_of_ones_own_loop_runs(torch_alone):
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "loop.md").read_text("utf-8"), re.DOTALL)[1]
    # -I: no PYTHONPATH, no user site, not this directory
    command = [torch_alone, "-I", "-c", PROGRAM]
    done = subprocess.run(command, input=example, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
