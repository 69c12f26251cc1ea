"""Audit of a published share of a Pareto frontier: its p-value, and how many points would be needed."""

import re

import numpy as np
from scipy import stats

from analysis.stats.text import number, probability
from lit_klrb.errors import ConfigurationError

ALPHA, POWER = 0.05, 0.8
LARGEST = 2_000
_SHARE = re.compile(r"(\d{1,6})/(\d{1,6})", re.ASCII)


def read_share(text: str) -> tuple[int, int]:
    """The numbers of a share "k/n".

    Raises:
        ConfigurationError: If the text is not such a share.
    """
    found = _SHARE.fullmatch(text)
    wins, total = map(int, found.groups()) if found else (0, 0)
    if not 0 < total >= wins:
        raise ConfigurationError(
            f"--share {text} is not allowed; K/N is expected, each of at most 6 digits: 7/9 for 7 of 9 points"
        )
    return wins, total


def sign_p(wins: int, total: int) -> float:
    """Two-sided p-value of an exact sign test with `wins` of `total` discordant pairs on one side.

    Example:
        >>> [round(sign_p(k, n), 4) for k, n in [(7, 9), (14, 18), (21, 27), (28, 36)]]
        [0.1797, 0.0309, 0.0059, 0.0012]
    """
    return float(stats.binomtest(wins, total).pvalue) if total else 1.0


def p_range(wins: int, total: int) -> tuple[float, float]:
    """The smallest and largest p-value of a share, which does not tell how many pairs have both runs on.

    Such a pair is one point of either side, and carries no information. Without it, the difference between
    both sides is the same, of fewer discordant pairs, and so p is smaller. Pairs are swapped one by one.

    Args:
        wins: Number of frontier points of the treatment.
        total: Number of frontier points.

    Example:
        >>> [round(p, 4) for p in p_range(7, 9)]  # 5 of 5 discordant pairs, and 7 of 9
        [0.0625, 0.1797]
    """
    both = min(wins, total - wins)
    return sign_p(wins - both, total - 2 * both), sign_p(wins, total)


def range_text(wins: int, total: int) -> str:
    """The range of p-values of a share; one number if all are equal."""
    return " to ".join(dict.fromkeys(number(p, 2) for p in p_range(wins, total)))


def points_needed(share: float) -> int | None:
    """Number of discordant pairs with which p <= 0.05 has a probability of 80%, given the true share.

    The power of an exact test is not monotone in n; this is the smallest n from which it is never below 80%.
    None if n exceeds 2,000, as for a share of one half.

    Example:
        >>> points_needed(7 / 9), points_needed(0.5)
        (28, None)
    """
    sizes = np.arange(1, LARGEST + 1)
    # Reject at `critical` wins or more of either side.
    critical = stats.binom.isf(ALPHA / 2, sizes, 0.5) + 1
    power = stats.binom.sf(critical - 1, sizes, share) + stats.binom.cdf(sizes - critical, sizes, share)
    below = np.flatnonzero(power < POWER)
    last = int(sizes[below[-1]]) if len(below) else 0
    return None if last == LARGEST else last + 1


def audit_share(wins: int, total: int) -> list[str]:
    """Lines on the evidence that "k of the n frontier points" can be, by what it leaves open."""
    both = min(wins, total - wins)
    least, most = (probability(p) for p in p_range(wins, total))
    unknown = "how many pairs have both runs on the frontier"
    found = (
        f"does not depend on {unknown}: {most}."
        if least == most
        else f"depends on {unknown}, which a share does not tell: {least} with {both}, the most possible, to "
        f"{most} with none."
    )
    return [
        f"{wins} of {total} frontier points ({wins / total:.0%}) are the treatment's.",
        f"The exact two-sided swap p of matched pairs, each with its own seed, {found}",
        f"With none, all {total} points are of discordant pairs: the smallest attainable p is "
        f"{number(sign_p(total, total), 2)}. {settle(wins, total)}",
    ]


def settle(wins: int, total: int) -> str:
    """A sentence on the number of discordant pairs that a share like this one needs."""
    share = max(wins, total - wins) / total if total else 0.5
    needed = points_needed(share)
    if needed is None:
        return f"A true share of {share:.0%} would need more than {LARGEST:,} discordant pairs."
    if needed <= total:
        return f"This is enough: a true share of {share:.0%} is detected with 80% power from {needed} on."
    return (
        f"A true share of {share:.0%} needs {needed} discordant pairs, {number(needed / total, 2)} times as "
        f"many replicates (80% power, p <= {ALPHA:g})."
    )
