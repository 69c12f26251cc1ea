"""Names in a report are displayed unchanged and never interpreted."""

import io
import sys
from html import escape

from rich.console import Console
from synthetic import write_sweep

from analysis.report.build import build
from analysis.report.verify import verify
from analysis.sweep.progress import Progress

HOSTILE = ["<script>alert(1)</script>&\"'", r"$\frac{$", "[/i]", "{x} 100% {{ 7 * 7 }}"]


def test_a_report_of_hostile_labels(tmp_path):
    path = build(write_sweep(tmp_path, estimators=("MonteCarlo", *HOSTILE), replicates=2, betas={0: 0.1}))
    page = path.read_text("utf-8")
    assert "<script" not in page
    shown = page.replace("&#34;", '"').replace("&#39;", "'")
    assert all(escape(label, quote=False) in shown for label in HOSTILE)
    assert verify(path).differences == []


def test_a_result_directory_is_not_run(tmp_path, monkeypatch, undrawn):
    """Names of classes in a plan and in its results are read as text."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_estimators.py").write_text("raise SystemExit('imported')")
    runs = write_sweep(
        tmp_path / "runs", estimators=("their_estimators.Control", "their_estimators.Other"), replicates=2
    )
    assert verify(build(runs)).differences == []
    assert "their_estimators" not in sys.modules


def test_a_sweep_of_any_name_shows_its_progress():
    out = io.StringIO()
    with Progress("[/i]", Console(file=out, force_terminal=True)) as progress:
        progress.counted(1, 2)
    assert "[/i]" in out.getvalue()
