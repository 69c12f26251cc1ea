"""What is reported about one or several policies and a reference: as plain numbers, and as text."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from lit_klrb.comparison.estimates import (
    EXACT,
    HT,
    K1,
    LIKELIHOOD,
    RB,
    ClusteredEstimate,
    TokenTable,
    difference,
)
from lit_klrb.errors import printable
from lit_klrb.terminal import print_table

NAMES = {"forward": ("policy", "reference"), "reverse": ("reference", "policy")}
# A heading, sentences, and the header and the rows of a table, of which each may be empty.
Part = tuple[str, list[str], Sequence[str], Sequence[Sequence[str]]]


class Candidate(NamedTuple):
    """A policy and its statistics.

    Args:
        path: The policy.
        tokenizers: What `notes_of` said.
        tables: Statistics by direction, "forward" and "reverse".
        floor: Statistics of the policy against itself, see `noise_floor`.
        unfinished: Fraction of the policy's completions that did not end; None for given texts.
        own_context: Whether the reference reads other prompts than the policy.
    """

    path: str
    tokenizers: str
    tables: dict[str, TokenTable]
    floor: dict[str, TokenTable]
    unfinished: float | None
    own_context: bool = False


def summary(candidates: Sequence[Candidate], reference: str, level: float) -> dict[str, Any]:
    """All estimates, by candidate and in pairs of candidates, as a dictionary for JSON."""
    sampled = candidates[0].unfinished is not None
    exact = {
        candidate.path: {d: table.estimates(level)[table.exact] for d, table in candidate.tables.items()}
        for candidate in candidates
    }
    pairs = [
        {
            "first": first,
            "second": second,
            "differences": {
                d: _numbers({unit: difference(one, theirs[d][unit], level) for unit, one in units.items()})
                for d, units in ours.items()
            },
        }
        for (first, ours), (second, theirs) in combinations(exact.items(), 2)
    ]
    policies = [_of_candidate(candidate, sampled, level) for candidate in candidates]
    return {"reference": reference, "sampled": sampled, "level": level, "policies": policies, "pairs": pairs}


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


def _of_candidate(candidate: Candidate, sampled: bool, level: float) -> dict[str, Any]:
    directions: dict[str, dict[str, Any]] = {
        direction: {
            "estimand": estimand(direction, sampled, candidate.own_context),
            "clusters": table.clusters,
            "sequences": len(table.mask) if sampled else table.clusters,
            "tokens": int(table.mask.sum()),
            "estimates": {name: _numbers(units) for name, units in table.estimates(level).items()},
            "positions": table.positions(level),
            "token_quantiles": table.quantiles(),
        }
        for direction, table in candidate.tables.items()
    }
    if "reverse" in directions:  # the same number as forward, with the other sign
        directions["reverse"]["estimates"].pop(LIKELIHOOD, None)
    floor = {
        name: {unit: estimate.value for unit, estimate in table.estimates(level)[table.exact].items()}
        | {"maximum": table.quantiles((1.0,))["1"]}
        for name, table in candidate.floor.items()
    }
    about = {"policy": candidate.path, "tokenizers": candidate.tokenizers, "unfinished": candidate.unfinished}
    return {**about, "directions": directions, "noise_floor": floor}


def _numbers(units: dict[str, ClusteredEstimate]) -> dict[str, dict[str, float | None]]:
    return {unit: estimate.numbers() for unit, estimate in units.items()}


def print_report(summary: dict[str, Any]) -> None:
    """Print the summary: sentences, and tables as wide as the terminal or tab-separated."""
    for number, (heading, lines, header, rows) in enumerate(_parts(summary)):
        print("\n" * bool(number) + "\n".join(map(printable, [heading, *lines])))
        if rows:
            print_table(header, rows)


def _parts(summary: dict[str, Any]) -> Iterator[Part]:
    """What is shown, in order."""
    unit, (_, *header) = "sequence" if summary["sampled"] else "text", _header("", summary)
    for policy in summary["policies"]:
        lines = [f"reference: {summary['reference']}", f"tokenizers: {policy['tokenizers']}"]
        if policy["unfinished"]:
            lines.append(f"{policy['unfinished']:.0%} of its completions were cut at the maximum length")
        yield f"policy: {policy['policy']}", lines, (), ()
        for direction in policy["directions"].values():
            yield from _of_direction(direction, summary)
        itself = "the policy against itself", f"per {unit}", "per token", "largest token"
        keys, floor = ("sequence", "token", "maximum"), policy["noise_floor"].items()
        rows: list[Sequence[str]] = [
            (name, *(_number(numbers[key]) for key in keys)) for name, numbers in floor
        ]
        line = "measured on the first batch; a KL of this size is no difference between models"
        yield "noise floor: KL of the policy to itself, from rounding alone", [line], itself, rows
    if pairs := summary["pairs"]:
        rows = [
            (f"{pair['first']} − {pair['second']}", direction, *_of_units(units))
            for pair in pairs
            for direction, units in pair["differences"].items()
        ]
        same = f"the same {'prompts' if summary['sampled'] else 'texts'}"
        line = f"{same}: standard errors of paired differences; each interval holds by itself"
        yield "differences between policies", [line], ("policies", "direction", *header), rows


def _of_direction(about: dict[str, Any], summary: dict[str, Any]) -> Iterator[Part]:
    sampled = summary["sampled"]
    clusters = "prompts" if sampled else "texts"
    counted = f"{about['sequences']} completions of " if sampled else ""
    lines = [
        f"{counted}{about['clusters']} {clusters}, {about['tokens']} tokens; standard errors and intervals "
        f"are clustered by {clusters[:-1]}"
    ]
    header = _header("estimate", summary)
    rows = [(name, *_of_units(units)) for name, units in about["estimates"].items()]
    if LIKELIHOOD in about["estimates"]:
        lines.append(f"{LIKELIHOOD} is that of the texts, policy to reference, and no estimate of the KL")
    if HT in about["estimates"]:
        lines.append(f"{HT} is {K1} where a prompt's completions differ and each is improbable")
    yield about["estimand"], lines, header, rows
    quantiles = ", ".join(f"{float(q):.1%} {_number(v)}" for q, v in about["token_quantiles"].items())
    positions = [
        (
            str(p["first"]) if p["first"] == p["last"] else f"{p['first']}-{p['last']}",
            str(p["tokens"]),
            *_cells(p),
            "-" if p["share"] is None else f"{p['share']:.0%}",
        )
        for p in about["positions"]
    ]
    line, header = f"quantiles of the tokens' KL: {quantiles}", ("position", "tokens", *header[4:])
    title = f"by position, {RB if sampled else EXACT}"
    yield title, [line], (*header, "share of the sum"), positions


def _header(name: str, summary: dict[str, Any]) -> tuple[str, ...]:
    interval, unit = f"{summary['level']:.0%} interval", "sequence" if summary["sampled"] else "text"
    return name, f"per {unit}", "± se", interval, "per token", "± se", interval


def _of_units(units: dict[str, Any]) -> tuple[str, ...]:
    return *_cells(units["sequence"]), *_cells(units["token"])


def _cells(numbers: dict[str, Any]) -> tuple[str, str, str]:
    low, high = numbers["low"], numbers["high"]
    interval = "-" if low is None else f"{_number(low)} to {_number(high)}"
    return _number(numbers["estimate"]), _number(numbers["se"]), interval


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
