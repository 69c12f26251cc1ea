"""Markdown tables, and documents whose parts are updated separately."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """Format with a number of significant digits; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def spread(times: Mapping[str, Sequence[float]], label: str, base: str) -> str:
    """The median over rounds of one variant's time divided by another's, quartiles in brackets."""
    ratios = [a / b for a, b in zip(times[label], times[base], strict=True)]
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def replace_part(document: Path, name: str, text: str) -> None:
    """Replace the text between the markers of a part, or append the part to the document."""
    begin, end = f"<!-- {name}: written by python -m benchmarks {name} -->", f"<!-- end of {name} -->"
    before = document.read_text("utf-8")
    part = f"{begin}\n{text.strip()}\n{end}\n"
    if begin in before:
        head, _, rest = before.partition(begin)
        document.write_text(head + part + rest.partition(end + "\n")[2], "utf-8")
    else:
        document.write_text(f"{before}\n{part}", "utf-8")
