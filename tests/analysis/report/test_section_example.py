"""The report section of docs/extending.md works as written, as the entry point of an installed package."""

import json
import re
import sys
from pathlib import Path

from synthetic import write_sweep

from analysis.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text("utf-8")


def test_the_section_of_an_installed_package_is_in_the_report(tmp_path, monkeypatch, undrawn):
    group, entry = re.search(
        r'^\[project.entry-points."(lit_klrb.report_\w+)"\]\n(.+)$', PAGE, re.MULTILINE
    ).groups()
    installed = tmp_path / "theirs-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\n{entry.replace(chr(34), '')}\n")
    (tmp_path / "my_section.py").write_text(re.search(r"# my_section\.py\n(.*?)```", PAGE, re.DOTALL)[1])
    monkeypatch.syspath_prepend(tmp_path)
    runs = write_sweep(tmp_path / "runs", replicates=2, betas={0: 0.1})
    assert main(["report", str(runs)]) == 0
    numbers = json.loads((runs / "results.json").read_text())["sections"]["lengths"]
    assert set(numbers.values()) == {20.0}
    assert "Length of completions" in (runs / "report.html").read_text("utf-8")
    assert main(["verify", str(runs)]) == 0
    sys.modules.pop("my_section")
