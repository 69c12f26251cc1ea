"""The report section of docs/extending.md works as written."""

import re
from pathlib import Path

from synthetic import write_sweep

from analysis.report.assessment import load_assessment

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text("utf-8")


def test_the_section_is_made(tmp_path):
    example: dict[str, object] = {}
    exec(re.search(r"# my_section\.py\n(.*?)```", PAGE, re.DOTALL)[1], example)
    section = example["lengths"](load_assessment(write_sweep(tmp_path)))
    assert set(section.numbers.values()) == {20.0}
    assert len(section.tables[0].rows) == len(section.numbers) == 24
