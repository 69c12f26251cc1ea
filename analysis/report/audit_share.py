"""What a published share of a Pareto frontier supports, and how many points would settle it."""

import numpy as np
from scipy import stats

from analysis.stats.text import number, probability
from lit_klrb.errors import ConfigurationError

ALPHA, POWER = 0.05, 0.8
LARGEST = 2_000


def read_share(text: str) -> tuple[int, int]:
    """Both numbers of "k/n".

    Raises:
        ConfigurationError: If it is no such share.
    """
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 0 < int(second) >= int(first)):
        raise ConfigurationError(f"--share {text} is not allowed; K/N is expected: 7/9 for 7 of 9 points")
    return int(first), int(second)


def sign_p(wins: int, total: int) -> float:
    """Two-sided p of so many of the discordant pairs on one side: exact, each side as likely.

    Example:
        >>> [round(sign_p(k, n), 4) for k, n in [(7, 9), (14, 18), (21, 27), (28, 36)]]
        [0.1797, 0.0309, 0.0059, 0.0012]
    """
    return float(stats.binomtest(wins, total).pvalue) if total else 1.0


def points_needed(share: float) -> int | None:
    """Discordant pairs with which 80% of studies would find p <= 0.05, if the true share is this one.

    The power of an exact test is a sawtooth in n: this is the n from which on it stays above. None if it
    takes more than 2,000, so for a share of one half.

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
    """What "k of the n frontier points" supports, at best."""
    lines = [
        f"{wins} of {total} frontier points ({wins / total:.0%}) are the treatment's.",
        "At best every point comes from a matched pair whose other run is off the frontier; then the exact "
        f"two-sided swap {probability(sign_p(wins, total))}. Pairs with both runs on it carry no "
        "information: with them p is larger.",
        f"The smallest p that {total} such points allow at all: {number(sign_p(total, total), 2)}.",
    ]
    return [*lines, settle(wins, total)]


def settle(wins: int, total: int) -> str:
    """How many discordant pairs would settle a share like this one."""
    share = max(wins, total - wins) / total if total else 0.5
    needed = points_needed(share)
    if needed is None:
        return f"A true share of {share:.0%} would take more than {LARGEST:,} discordant pairs to settle."
    if needed <= total:
        return f"There are enough of them: {needed} find a true share of {share:.0%} in 80% of studies."
    return (
        f"To settle it, if the true share is {share:.0%}: {needed} discordant pairs, that is "
        f"{number(needed / total, 2)} times as many replicates (80% power, p <= {ALPHA:g})."
    )
