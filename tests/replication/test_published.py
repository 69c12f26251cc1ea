"""Reports under replication/results agree with their result files; `make claims` verifies all of them."""

import shutil
from pathlib import Path

import pytest

from analysis.report import figures
from replication.__main__ import main

RESULTS = Path(__file__).parents[2] / "replication" / "results"
# Small sweeps: with blocks and a tuned rate, and decided by the KL.
SAMPLE = ("smollm2_rates", "smollm2_json")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_report_agrees_with_its_results(name, capsys):
    # 3: before its report is written again, after a change of the statistics, see `rebuild`
    assert main(["verify", str(RESULTS / name)]) in (0, 3)
    assert "differs" not in capsys.readouterr().out


def test_reports_are_written_again_and_verified_together(tmp_path, capsys, monkeypatch):
    # Drawings take most of the time
    monkeypatch.setattr(figures.Canvas, "savefig", lambda canvas, file, **_: file.write("<svg/>"))
    for name in SAMPLE:
        shutil.copytree(RESULTS / name, tmp_path / name)
    assert main(["rebuild", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"0 {tmp_path / name}" for name in sorted(SAMPLE)]
    numbers = tmp_path / SAMPLE[0] / "results.json"
    numbers.write_text(numbers.read_text("utf-8").replace('"complete":true', '"complete":false'), "utf-8")
    assert main(["verify", str(tmp_path)]) == 1
