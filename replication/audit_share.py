"""Audit of a published share of a Pareto frontier: its p-value, and how many points would be needed."""

import numpy as np
from scipy import stats

from analysis.stats.text import number, probability
from lit_klrb.errors import ConfigurationError

ALPHA, POWER = 0.05, 0.8
LARGEST = 2_000


def read_share(text: str) -> tuple[int, int]:
    """The numbers of a share "k/n".

    Raises:
        ConfigurationError: If the text is not such a share.
    """
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 0 < int(second) >= int(first)):
        raise ConfigurationError(f"--share {text} is not allowed; K/N is expected: 7/9 for 7 of 9 points")
    return int(first), int(second)


def sign_p(wins: int, total: int) -> float:
    """Two-sided p-value of an exact sign test with `wins` of `total` discordant pairs on one side.

    Example:
        >>> [round(sign_p(k, n), 4) for k, n in [(7, 9), (14, 18), (21, 27), (28, 36)]]
        [0.1797, 0.0309, 0.0059, 0.0012]
    """
    return float(stats.binomtest(wins, total).pvalue) if total else 1.0


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
    """Lines on the strongest evidence that "k of the n frontier points" can provide."""
    lines = [
        f"{wins} of {total} frontier points ({wins / total:.0%}) are the treatment's.",
        "If every point is from a matched pair whose other run is not on the frontier, the exact two-sided "
        f"swap {probability(sign_p(wins, total))}. Pairs with both runs on the frontier carry no "
        "information; with such pairs, p is larger.",
        f"The smallest attainable p with {total} such points is {number(sign_p(total, total), 2)}.",
    ]
    return [*lines, settle(wins, total)]


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
