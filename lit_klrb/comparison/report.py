"""The summary of a comparison as text and as an HTML page."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from lit_klrb.comparison.estimates import EXACT, HT, K1, LIKELIHOOD, RB
from lit_klrb.errors import printable

# Width and height of the figure, and the space for its axes, in pixels
WIDTH, HEIGHT, MARGIN = 640, 220, 50
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;margin:.5rem 0 1.5rem}
td,th{padding:.2rem .8rem;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"""


class Part(NamedTuple):
    """A heading, sentences, and a table, of which each may be missing."""

    heading: str
    lines: list[str]
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    positions: Sequence[dict[str, Any]] = ()


def text_report(summary: dict[str, Any]) -> str:
    """The summary as text for a terminal of a hundred columns."""
    parts = []
    for section in sections(summary):
        table = _aligned(section.header, section.rows) if section.rows else []
        parts.append("\n".join(map(printable, [section.heading, *section.lines, *table])))
    return "\n\n".join(parts)


def html_report(summary: dict[str, Any]) -> str:
    """The summary as one self-contained HTML page, which runs and loads nothing."""
    body = []
    for section in sections(summary):
        body.append(f"<h2>{escape(section.heading)}</h2>")
        body += [f"<p>{escape(line)}</p>" for line in section.lines]
        if section.positions:
            body.append(_figure(section.positions))
        if section.rows:
            head = "".join(f"<th>{escape(cell)}</th>" for cell in section.header)
            rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in section.rows)
            cells = "".join(f"<tr>{row}</tr>" for row in rows)
            body.append(f'<div class="wide"><table><tr>{head}</tr>{cells}</table></div>')
    title = f"KL to {summary['reference']}"
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )
    return printable(page, keep="\n")


def sections(summary: dict[str, Any]) -> list[Part]:
    """What both reports show, in order."""
    found = []
    unit = "sequence" if summary["sampled"] else "text"
    for policy in summary["policies"]:
        lines = [f"reference: {summary['reference']}", f"tokenizers: {policy['tokenizers']}"]
        if policy["unfinished"]:
            lines.append(f"{policy['unfinished']:.0%} of its completions were cut at the maximum length")
        found.append(Part(f"policy: {policy['policy']}", lines))
        for direction in policy["directions"].values():
            found += _of_direction(direction, summary["level"], unit, summary["sampled"])
        floor = [
            (name, *(_number(numbers[key]) for key in ("sequence", "token", "maximum")))
            for name, numbers in policy["noise_floor"].items()
        ]
        found.append(
            Part(
                "noise floor: KL of the policy to itself, from rounding alone",
                ["measured on the first batch; a KL of this size is no difference between models"],
                ("the policy against itself", f"per {unit}", "per token", "largest token"),
                floor,
            )
        )
    if pairs := summary["pairs"]:
        rows = [
            (
                f"{pair['first']} − {pair['second']}",
                direction,
                *_cells(units["sequence"]),
                *_cells(units["token"]),
            )
            for pair in pairs
            for direction, units in pair["differences"].items()
        ]
        same = f"the same {'prompts' if summary['sampled'] else 'texts'}"
        line = f"{same}: standard errors of paired differences; each interval holds by itself"
        _, *header = _header("", summary["level"], unit)
        found.append(Part("differences between policies", [line], ("policies", "direction", *header), rows))
    return found


def _of_direction(about: dict[str, Any], level: float, unit: str, sampled: bool) -> list[Part]:
    clusters = "prompts" if sampled else "texts"
    counted = f"{about['sequences']} completions of " if sampled else ""
    lines = [
        f"{counted}{about['clusters']} {clusters}, {about['tokens']} tokens; standard errors and intervals "
        f"are clustered by {clusters[:-1]}"
    ]
    header = _header("estimate", level, unit)
    rows = [
        (name, *_cells(units["sequence"]), *_cells(units["token"]))
        for name, units in about["estimates"].items()
    ]
    if LIKELIHOOD in about["estimates"]:
        lines.append(f"{LIKELIHOOD} is that of the texts, policy to reference, and no estimate of the KL")
    if HT in about["estimates"]:
        lines.append(f"{HT} is {K1} where a prompt's completions differ and each is improbable")
    quantiles = ", ".join(f"{float(q):.1%} {_number(v)}" for q, v in about["token_quantiles"].items())
    positions = [
        (
            str(p["first"]) if p["first"] == p["last"] else f"{p['first']}-{p['last']}",
            str(p["tokens"]),
            *_cells(p),
            "-" if math.isnan(p["share"]) else f"{p['share']:.0%}",
        )
        for p in about["positions"]
    ]
    return [
        Part(about["estimand"], lines, header, rows),
        Part(
            f"by position, {EXACT if unit == 'text' else RB}",
            [f"quantiles of the tokens' KL: {quantiles}"],
            ("position", "tokens", *header[4:], "share of the sum"),
            positions,
            about["positions"],
        ),
    ]


def _header(name: str, level: float, unit: str) -> tuple[str, ...]:
    interval = f"{level:.0%} interval"
    return name, f"per {unit}", "± se", interval, "per token", "± se", interval


def _cells(numbers: dict[str, Any]) -> tuple[str, str, str]:
    low, high = numbers["low"], numbers["high"]
    interval = "-" if low is None else f"{_number(low)} to {_number(high)}"
    return _number(numbers["estimate"]), _number(numbers["se"]), interval


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: the first to the left, the others to the right."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *rest in table:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def _figure(positions: Sequence[dict[str, Any]]) -> str:
    """KL per token by position, with intervals, as SVG."""
    tops = [p["high"] or p["estimate"] or 0.0 for p in positions]
    largest = max(tops) or 1.0
    marks = []
    for index, position in enumerate(positions):
        x = MARGIN + (index + 0.5) * (WIDTH - 2 * MARGIN) / len(positions)
        label = position["first"] if position["first"] == position["last"] else f"{position['first']}–"
        marks.append(f'<text x="{x:.1f}" y="{HEIGHT - 15}" text-anchor="middle">{label}</text>')
        if position["estimate"] is None:
            continue
        given = (position[name] for name in ("low", "estimate", "high"))
        values = (position["estimate"] if value is None else value for value in given)
        low, middle, high = (
            HEIGHT - MARGIN + 10 - (HEIGHT - 2 * MARGIN) * max(0.0, value) / largest for value in values
        )
        marks.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="#666"/>')
        marks.append(f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="KL per token by position" '
        f'font-size="12"><text x="5" y="20">KL per token, nats (top of the axis: {_number(largest)})</text>'
        f'<path d="M{MARGIN} {HEIGHT - MARGIN + 10}H{WIDTH - MARGIN}" stroke="#999"/>{"".join(marks)}</svg>'
    )
