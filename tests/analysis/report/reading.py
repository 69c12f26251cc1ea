"""Functions for tests that read the page of a sweep and its numbers."""

from html.parser import HTMLParser

import pytest
from synthetic import grid_results as grid_results, write_sweep

from analysis.report import figures
from analysis.report.assessment import load_assessment
from analysis.report.build import build, summary_numbers
from analysis.report.sections import execution
from analysis.report.sections.summary import summary

FIVE = (
    "MonteCarlo",
    "RaoBlackwell",
    "RaoBlackwellControlVariate",
    "ReleasedMonteCarlo",
    "ReleasedRaoBlackwell",
)
SMALL = {"replicates": 2, "betas": {0: 0.1}}


class Page(HTMLParser):
    """Tags, ids, images and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.ids, self.images, self.regions, self.words = [], [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.images += [attributes] if tag == "img" else []
        self.regions += [attributes["aria-label"]] if attributes.get("role") == "region" else []

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())


def page_of(runs, **design) -> Page:
    return Page(build(write_sweep(runs, **design)).read_text("utf-8"))


def text_of(runs) -> str:
    """The findings, text and tables of a report, without drawings, which take seconds."""
    study = load_assessment(runs)
    sections = [summary(study), execution(study)]
    words = [word for s in sections for word in (*s.paragraphs, *s.notes)]
    tables = [table for s in sections for table in s.tables]
    words += [cell for table in tables for row in table.rows for cell in row]
    return " ".join(" ".join(words).replace("\u00a0", " ").split())


def numbers(runs):
    return summary_numbers(load_assessment(runs))


@pytest.fixture
def undrawn(monkeypatch):
    """Replace drawings by empty ones, as they take most of the time of a page."""
    monkeypatch.setattr(figures.Canvas, "savefig", lambda canvas, file, **_: file.write("<svg/>"))


@pytest.fixture
def sweep_with(tmp_path, monkeypatch):
    """A sweep of which one run has the artifacts."""

    def written(**artifacts):
        monkeypatch.setattr("synthetic.studies", lambda beta: artifacts)
        return write_sweep(tmp_path, studied=[0.1], **SMALL)

    return written
