from importlib import import_module

import pytest

from analysis.report import figures

# The package's attribute of this name is the function.
certificates = import_module("analysis.report.sections.certificates")


@pytest.fixture(scope="session", autouse=True)
def few_simulated_sweeps():
    """The certificates of each page take seconds; one test has them whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "_MOST", 20)
        patch.setattr(certificates, "_FEWEST", 20)
        yield


@pytest.fixture
def undrawn(monkeypatch):
    """Empty drawings: to render them takes most of a page's time."""
    monkeypatch.setattr(figures.Canvas, "savefig", lambda canvas, file, **_: file.write("<svg/>"))
