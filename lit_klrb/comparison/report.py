"""The summary of a comparison as text."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lit_klrb.comparison.estimates import EXACT, HT, K1, LIKELIHOOD, RB
from lit_klrb.errors import printable
from lit_klrb.terminal import print_table


class Part(NamedTuple):
    """A heading, sentences, and a table, of which each may be missing."""

    heading: str
    lines: list[str]
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def print_report(summary: dict[str, Any]) -> None:
    """Print the summary: sentences, and tables as wide as the terminal or tab-separated."""
    for number, section in enumerate(sections(summary)):
        print("\n" * bool(number) + "\n".join(map(printable, [section.heading, *section.lines])))
        if section.rows:
            print_table(section.header, section.rows)


def sections(summary: dict[str, Any]) -> list[Part]:
    """What is shown, in order."""
    found = []
    unit = "sequence" if summary["sampled"] else "text"
    for policy in summary["policies"]:
        lines = [f"reference: {summary['reference']}", f"tokenizers: {policy['tokenizers']}"]
        if policy["unfinished"]:
            lines.append(f"{policy['unfinished']:.0%} of its completions were cut at the maximum length")
        found.append(Part(f"policy: {policy['policy']}", lines))
        for direction in policy["directions"].values():
            found += _of_direction(direction, summary["level"], unit, summary["sampled"])
        itself = "the policy against itself", f"per {unit}", "per token", "largest token"
        keys, floor = ("sequence", "token", "maximum"), policy["noise_floor"].items()
        rows = [(name, *(_number(numbers[key]) for key in keys)) for name, numbers in floor]
        line = "measured on the first batch; a KL of this size is no difference between models"
        title = "noise floor: KL of the policy to itself, from rounding alone"
        found.append(Part(title, [line], itself, rows))
    if pairs := summary["pairs"]:
        rows = [
            (f"{pair['first']} − {pair['second']}", direction, *_of_units(units))
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
    rows = [(name, *_of_units(units)) for name, units in about["estimates"].items()]
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
        ),
    ]


def _header(name: str, level: float, unit: str) -> tuple[str, ...]:
    interval = f"{level:.0%} interval"
    return name, f"per {unit}", "± se", interval, "per token", "± se", interval


def _of_units(units: dict[str, Any]) -> tuple[str, ...]:
    return *_cells(units["sequence"]), *_cells(units["token"])


def _cells(numbers: dict[str, Any]) -> tuple[str, str, str]:
    low, high = numbers["low"], numbers["high"]
    interval = "-" if low is None else f"{_number(low)} to {_number(high)}"
    return _number(numbers["estimate"]), _number(numbers["se"]), interval


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
