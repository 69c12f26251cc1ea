"""What is reported about one or several policies and a reference, as plain numbers."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from lit_klrb.comparison.estimates import LIKELIHOOD, ClusteredEstimate, TokenTable, difference

NAMES = {"forward": ("policy", "reference"), "reverse": ("reference", "policy")}


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
    return {
        "reference": reference,
        "sampled": sampled,
        "level": level,
        "policies": [_of_candidate(candidate, sampled, level) for candidate in candidates],
        "pairs": [
            {
                "first": first,
                "second": second,
                "differences": {d: _differences(ours[d], theirs[d], level) for d in ours},
            }
            for (first, ours), (second, theirs) in combinations(exact.items(), 2)
        ],
    }


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
            "sequences": len(table.mask) if table.group_size is not None else table.clusters,
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
    return {
        "policy": candidate.path,
        "tokenizers": candidate.tokenizers,
        "unfinished": candidate.unfinished,
        "directions": directions,
        "noise_floor": floor,
    }


def _numbers(units: dict[str, ClusteredEstimate]) -> dict[str, dict[str, float | None]]:
    return {unit: estimate.numbers() for unit, estimate in units.items()}


def _differences(
    ours: dict[str, ClusteredEstimate], theirs: dict[str, ClusteredEstimate], level: float
) -> dict[str, dict[str, float | None]]:
    return _numbers({unit: difference(ours[unit], theirs[unit], level) for unit in ours})
