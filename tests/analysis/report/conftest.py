import pytest

from analysis.report import figures


@pytest.fixture
def undrawn(monkeypatch):
    """Empty drawings: to render them takes most of a page's time."""
    monkeypatch.setattr(figures.Canvas, "savefig", lambda canvas, file, **_: file.write("<svg/>"))
