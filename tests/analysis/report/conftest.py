import pytest
from reading import sweep_with as sweep_with, undrawn as undrawn
from synthetic import write_sweep

from analysis.report.build import build


@pytest.fixture(scope="session")
def better(tmp_path_factory):
    """A sweep with a clear verdict, and its page. Tests must not change it."""
    runs = tmp_path_factory.mktemp("better")
    build(write_sweep(runs, lift={"RaoBlackwell": 0.3}, replicates=5))
    return runs
