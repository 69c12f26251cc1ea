"""Names in a report are displayed unchanged and never interpreted."""

import io
import sys
import unicodedata
from html import escape

import pytest
from rich.console import Console
from synthetic import edit_plan, write_sweep

from analysis.report.build import build
from analysis.report.verify import verify
from analysis.sweep.progress import Progress
from lit_klrb.errors import ConfigurationError

HOSTILE = ["<script>alert(1)</script>&\"'", r"$\frac{$", "[/i]", "{x} 100% {{ 7 * 7 }}"]


def test_a_report_of_hostile_labels(tmp_path):
    path = build(write_sweep(tmp_path, estimators=("MonteCarlo", *HOSTILE), replicates=2, betas={0: 0.1}))
    page = path.read_text("utf-8")
    assert "<script" not in page
    shown = page.replace("&#34;", '"').replace("&#39;", "'")
    assert all(escape(label, quote=False) in shown for label in HOSTILE)
    assert verify(path).differences == []


def test_control_and_bidirectional_characters_of_a_plan_are_escapes(tmp_path, undrawn):
    odd = "a\x1b[31m\u202etfel\u2066\x85b\u2028c"
    runs = write_sweep(tmp_path, replicates=2, betas={0: 0.1})

    def rename(document):
        for plan in (document["content"]["plan"], document["history"][-1]["plan"]):
            plan.update(name=odd, setting=f"On {odd}.")

    edit_plan(runs, rename)
    page = build(runs).read_text("utf-8")
    assert {unicodedata.category(c) for c in page if c not in "\n\t"}.isdisjoint({"Cc", "Cf", "Zl", "Zp"})
    assert "a\\x1b[31m\\u202etfel\\u2066\\x85b\\u2028c" in page
    assert verify(runs).differences == []


def test_numbers_of_another_program_are_not_replaced(tmp_path):
    runs = write_sweep(tmp_path / "runs", replicates=2, betas={0: 0.1})
    (tmp_path / "mine").mkdir()
    for mine in ('{"accuracy": 0.9}', "[1]", '{"schema": 2}', "not JSON"):
        (tmp_path / "mine" / "results.json").write_text(mine)
        with pytest.raises(ConfigurationError, match=r"results\.json holds something else"):
            build(runs, tmp_path / "mine" / "page.html")
        assert (tmp_path / "mine" / "results.json").read_text() == mine
        assert not (tmp_path / "mine" / "page.html").exists()
    build(runs, tmp_path / "page.html")
    build(runs, tmp_path / "page.html")


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
