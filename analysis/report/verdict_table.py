"""The verdicts of a sweep as a table for other programs: CSV with all digits, or LaTeX."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.report.assessment import Assessment
from analysis.report.build import summary_numbers
from analysis.stats.text import number
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import check_target, csv_text, write_output

_FIELDS = (
    *("arm", "control", "outcome", "decided by", "verdict"),
    *("difference", "low", "high", "level", "p", "p_adjusted", "gain", "gain_low", "gain_high"),
)
# Characters with a meaning in LaTeX
_SPECIAL = {character: f"\\{character}" for character in "&%$#_{}"}
_SPECIAL |= {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}


def write_table(assessment: Assessment, path: Path) -> None:
    """Write one row per comparison: `p` is corrected over all of them in `p_adjusted`.

    Args:
        assessment: The assessed sweep.
        path: The file, whose suffix is `.csv` or `.tex`.

    Raises:
        ConfigurationError: If the suffix is another one, or the file cannot be written.
    """
    made = {".csv": _as_csv, ".tex": _as_latex}.get(path.suffix)
    if made is None:
        raise ConfigurationError(f"--table {path}: a name that ends in .csv or .tex is expected")
    check_target(path)
    rows = [
        _row(one, assessment.sweep.plan.primary.outcome) for one in summary_numbers(assessment)["comparisons"]
    ]
    write_output(path, made(rows).encode())


def _row(comparison: Mapping[str, Any], decides: str) -> dict[str, Any]:
    verdict, gain = comparison[decides], comparison["gain"]
    low, high = verdict["interval"] or (None, None)
    gain_low, gain_high = gain["interval"] or (None, None)
    words = comparison["treatment"], comparison["control"], decides, comparison["decided_by"]
    numbers = verdict["estimate"], low, high, verdict["level"], verdict["p"], verdict["p_adjusted"]
    gained = gain["estimate"], gain_low, gain_high
    return dict(zip(_FIELDS, (*words, comparison["outcome"], *numbers, *gained), strict=True))


def _as_csv(rows: list[dict[str, Any]]) -> str:
    return csv_text(_FIELDS, [[*row.values()] for row in rows])


def _as_latex(rows: list[dict[str, Any]]) -> str:
    """A `tabular` with booktabs' rules; differences with their simultaneous intervals."""
    level = f"{100 * rows[0]['level']:.3g}\\,\\%" if rows else ""
    head = rf"Arm & Verdict & Difference & {level} interval & $p$ \\"
    lines = [" & ".join(map(_latex, _cells(row))) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{tabular}{llrrr}",
            r"\toprule",
            head,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    interval = "" if row["low"] is None else f"{number(row['low'])} to {number(row['high'])}"
    p = "" if row["p_adjusted"] is None else number(row["p_adjusted"], 2)
    return row["arm"], row["verdict"].replace("_", " "), number(row["difference"]), interval, p


def _latex(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in text).replace("−", "$-$")
