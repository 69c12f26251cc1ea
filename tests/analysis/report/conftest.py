import pytest
from synthetic import write_sweep

from analysis.report import figures
from analysis.report.build import build


@pytest.fixture
def undrawn(monkeypatch):
    """Replace drawings by empty ones, as they take most of the time of a page."""
    monkeypatch.setattr(figures.Canvas, "savefig", lambda canvas, file, **_: file.write("<svg/>"))


@pytest.fixture(scope="session")
def better(tmp_path_factory):
    """A sweep with a clear verdict, and its page. Tests must not change it."""
    runs = tmp_path_factory.mktemp("better")
    build(write_sweep(runs, lift={"RaoBlackwell": 0.3}, replicates=5))
    return runs
