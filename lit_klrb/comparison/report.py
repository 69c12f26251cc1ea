"""What is reported about a policy and a reference: as plain numbers, and as text."""

from collections.abc import Iterator, Sequence
from typing import Any

from lit_klrb.comparison.compare import Measured
from lit_klrb.comparison.estimates import LIKELIHOOD, ClusteredEstimate
from lit_klrb.errors import printable
from lit_klrb.terminal import print_lines, print_table

NAMES = {"forward": ("policy", "reference"), "reverse": ("reference", "policy")}
# A heading, sentences, and the header and the rows of a table, of which each may be empty.
Part = tuple[str, list[str], Sequence[str], Sequence[Sequence[str]]]


def summary(measured: Measured, level: float) -> dict[str, Any]:
    """All estimates as a dictionary for JSON."""
    sampled = measured.unfinished is not None
    directions: dict[str, dict[str, Any]] = {
        direction: {
            "estimand": estimand(direction, sampled, measured.own_context),
            "clusters": table.clusters,
            "sequences": len(table.mask) if sampled else table.clusters,
            "tokens": int(table.mask.sum()),
            "estimates": {name: _numbers(units) for name, units in table.estimates(level).items()},
        }
        for direction, table in measured.tables.items()
    }
    if "reverse" in directions:  # the same number as forward, with the other sign
        directions["reverse"]["estimates"].pop(LIKELIHOOD, None)
    floor = {
        name: {unit: estimate.value for unit, estimate in table.estimates(level)[table.exact].items()}
        | {"maximum": table.largest}
        for name, table in measured.floor.items()
    }
    named = {name: getattr(measured, name) for name in ("policy", "reference", "tokenizers", "unfinished")}
    return {**named, "sampled": sampled, "level": level, "directions": directions, "noise_floor": floor}


def estimand(direction: str, sampled: bool, own_context: bool = False) -> str:
    """What is estimated, in words.

    Example:
        >>> estimand("forward", sampled=True)
        "KL(policy‖reference) of the policy's own completions, nats"
    """
    first, second = NAMES[direction]
    if sampled:
        context = ", each after its own prompts" if own_context else ""
        return f"KL({first}‖{second}) of the {first}'s own completions{context}, nats"
    return (
        f"KL({first}‖{second}) of the next token at the contexts of the given texts, nats; exact at each "
        f"context, and the KL of completions only if the texts are samples of the {first}"
    )


def _numbers(units: dict[str, ClusteredEstimate]) -> dict[str, dict[str, float | None]]:
    return {unit: estimate.numbers() for unit, estimate in units.items()}


def print_report(summary: dict[str, Any]) -> None:
    """Print the summary: sentences, and tables as wide as the terminal or tab-separated."""
    for number, (heading, lines, header, rows) in enumerate(_parts(summary)):
        print_lines("\n" * bool(number) + printable(heading), *map(printable, lines))
        if rows:
            print_table(header, rows)


def _parts(summary: dict[str, Any]) -> Iterator[Part]:
    """What is shown, in order."""
    lines = [f"reference: {summary['reference']}", f"tokenizers: {summary['tokenizers']}"]
    if summary["unfinished"]:
        lines.append(f"{summary['unfinished']:.0%} of its completions were cut at the maximum length")
    yield f"policy: {summary['policy']}", lines, (), ()
    for direction in summary["directions"].values():
        yield _of_direction(direction, summary)
    unit = "sequence" if summary["sampled"] else "text"
    itself = "the policy against itself", f"per {unit}", "per token", "largest token"
    keys, floor = ("sequence", "token", "maximum"), summary["noise_floor"].items()
    rows = [(name, *(_number(numbers[key]) for key in keys)) for name, numbers in floor]
    line = "measured on the first batch; a KL of this size is no difference between models"
    yield "noise floor: KL of the policy to itself, from rounding alone", [line], itself, rows


def _of_direction(about: dict[str, Any], summary: dict[str, Any]) -> Part:
    clusters, unit = ("prompts", "sequence") if summary["sampled"] else ("texts", "text")
    counted = f"{about['sequences']} completions of " if summary["sampled"] else ""
    lines = [
        f"{counted}{about['clusters']} {clusters}, {about['tokens']} tokens; standard errors and intervals "
        f"are clustered by {clusters[:-1]}"
    ]
    if LIKELIHOOD in about["estimates"]:
        lines.append(f"{LIKELIHOOD} is that of the texts, policy to reference, and no estimate of the KL")
    header = "estimate", "per", "value", "± se", f"{summary['level']:.0%} interval"
    rows = [
        (name, shown, *_cells(units[key]))
        for key, shown in (("sequence", unit), ("token", "token"))
        for name, units in about["estimates"].items()
    ]
    return about["estimand"], lines, header, rows


def _cells(numbers: dict[str, Any]) -> tuple[str, str, str]:
    low, high = numbers["low"], numbers["high"]
    interval = "-" if low is None else f"{_number(low)} to {_number(high)}"
    return _number(numbers["estimate"]), _number(numbers["se"]), interval


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
