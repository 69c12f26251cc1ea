"""The page of a single run: KL and length over its steps, and completions before and after."""

import csv
from itertools import takewhile
from pathlib import Path
from typing import Any

from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, sheet
from analysis.report.html import page
from analysis.results.curves import curves
from analysis.results.layout import REPORT
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import check_target, write_atomically

# Evaluated metrics of the figure, with the labels of their axes.
SHOWN = {schema.KL: "KL, nats per completion", schema.LENGTH: "length, tokens"}


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a single run rather than a sweep."""
    return (directory / schema.RUN).is_file()


def build_run(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        run: The run directory.
        output: The page to write; `report.html` in the run directory by default.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: If the run has not been evaluated, or the page cannot be written.
    """
    output = run / REPORT if output is None else output
    check_target(output)
    sections = [_curves(run), _completions(run)]
    write_atomically(
        output, page(f"Run {run.name}", "Run report", "", [s for s in sections if s is not None])
    )
    return output


def _curves(run: Path) -> Section:
    found = curves(run / schema.METRICS_DIR)
    measured = {label: found[f"val/{name}"] for name, label in SHOWN.items() if f"val/{name}" in found}
    if not measured:
        raise ConfigurationError(f"{run} has no evaluation of completions yet; run fit first")
    steps = next(iter(measured.values()))["step"]
    rows = [[str(step), *(_at(curve, step) for curve in measured.values())] for step in steps]
    with sheet(2.4) as drawn:
        for axes, (label, curve) in zip(
            drawn.canvas.subplots(1, len(measured), squeeze=False)[0], measured.items(), strict=True
        ):
            values = [float("nan") if value is None else value for value in curve["value"]]
            axes.plot(curve["step"], values, color=INK, marker="o", markersize=4)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("step")
            axes.set_ylabel(label)
    table = Table("Evaluations.", ("step", *measured), rows)
    alt = f"{' and '.join(measured)} at {len(steps)} evaluations, from step {steps[0]} to {steps[-1]}."
    return Section(
        "curves",
        "KL and length",
        figures=[Figure(drawn.svg, alt, "Each point is an evaluation on the same held-out prompts.", table)],
    )


def _at(curve: dict[str, list[Any]], step: int) -> str:
    value = dict(zip(curve["step"], curve["value"], strict=True)).get(step)
    return "–" if value is None else f"{value:.3g}"


def _completions(run: Path) -> Section | None:
    """Completions of the first and the last evaluation; None if `CompletionTable` did not run."""
    tables = sorted((run / schema.COMPLETIONS).glob("step_*.csv"))
    if not tables:
        return None
    with tables[-1].open(newline="", encoding="utf-8") as file:
        rows = [_parts(row["text_at_start"], row["text"]) for row in csv.DictReader(file)]
    return Section(
        "completions",
        "Completions before and after",
        paragraphs=[
            "One completion of each of the first prompts of the evaluation, unselected. What both texts "
            "begin with, the prompt and sometimes a few words more, is in the first column."
        ],
        tables=[Table("Sampled with the same random numbers.", ("prompt", "before", "after"), rows)],
    )


def _parts(before: str, after: str) -> tuple[str, str, str]:
    r"""What two texts begin with, up to a line or a word, and the rest of each.

    Example:
        >>> _parts("Why?\nThe sea.", "Why?\nThe sky.")
        ('Why?', 'The sea.', 'The sky.')
    """
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    common = "".join(letter for letter, _ in same)
    length = 1 + max(common.rfind("\n"), -1 if "\n" in common else common.rfind(" "))
    return common[:length].strip(), before[length:].strip(), after[length:].strip()
