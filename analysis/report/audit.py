"""What published numbers support: a share of a Pareto frontier, or the points (method, KL, reward)."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from analysis.stats.frontier import nondominated
from analysis.stats.pairs import BoolArray, FloatArray
from analysis.stats.text import count, number, probability
from lit_klrb.errors import ConfigurationError

COLUMNS = ("method", "kl", "reward")
ALPHA, POWER = 0.05, 0.8
LARGEST = 2_000


@dataclass(frozen=True)
class Points:
    """Published runs.

    Attributes:
        method: Name of each run's method, [N].
        kl: KL in nats, [N]; `nan` for a run that diverged.
        reward: Mean reward, [N].
        pair: What each run is matched by (its beta and seed, say), [N]; None without such columns.
    """

    method: list[str]
    kl: FloatArray
    reward: FloatArray
    pair: list[tuple[str, ...]] | None


def read_points(path: Path) -> Points:
    """Points from a CSV file with the columns method, kl and reward; further columns match runs in pairs.

    Raises:
        ConfigurationError: If a column is missing or a number is none.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, header = list(reader), list(reader.fieldnames or [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from None
    missing = [name for name in COLUMNS if name not in header]
    if missing or not rows:
        raise ConfigurationError(
            f"{path}: {'has no column ' + missing[0] if missing else 'has no rows'}; the columns "
            f"{', '.join(COLUMNS)} are expected, and others that match runs in pairs, such as beta and seed"
        )
    keys = [name for name in header if name not in COLUMNS]
    kl, reward = (np.array([_number(path, name, row[name]) for row in rows]) for name in COLUMNS[1:])
    pair = [tuple(row[key] for key in keys) for row in rows] if keys else None
    return Points([row["method"] for row in rows], kl, reward, pair)


def _number(path: Path, column: str, text: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{path}: {column} is {text!r}; a number expected") from None


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
    return [*lines, _settle(wins, total)]


def _settle(wins: int, total: int) -> str:
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


def audit_points(points: Points, control: str) -> list[str]:
    """What the points support about every other method against the control.

    Raises:
        ConfigurationError: If there is no such method, or no other.
    """
    methods = list(dict.fromkeys(points.method))
    others = [name for name in methods if name != control]
    if control not in methods or not others:
        raise ConfigurationError(
            f"--control {control}: the file has the methods {', '.join(methods)}; name one of at least two"
        )
    lines = []
    for name in others:
        rows = [index for index, method in enumerate(points.method) if method in (name, control)]
        treated = np.array([points.method[row] == name for row in rows])
        member = nondominated(points.kl[rows], points.reward[rows])
        pair = None if points.pair is None else [points.pair[row] for row in rows]
        lines += _against(name, control, treated, member, pair)
    return lines


def _against(
    name: str, control: str, treated: BoolArray, member: BoolArray, pair: Sequence[tuple[str, ...]] | None
) -> list[str]:
    wins, total = int((member & treated).sum()), int(member.sum())
    lines = [f"{name} against {control}: {wins} of {count(total, 'frontier point')}."]
    if pair is not None and _all_matched(treated, pair):
        signs = {key: 0 for key in pair}
        for key, is_treated, on in zip(pair, treated, member, strict=True):
            signs[key] += (1 if is_treated else -1) * int(on)
        ahead, discordant = sum(s > 0 for s in signs.values()), sum(s != 0 for s in signs.values())
        lines.append(
            f"{count(len(signs), 'matched pair')}, {discordant} with exactly one run on the frontier, "
            f"{ahead} of these {name}'s: exact swap {probability(sign_p(ahead, discordant))}."
        )
        return [*lines, _settle(ahead, discordant)]
    table = [[wins, total - wins], [int(treated.sum()) - wins, int((~treated).sum()) - (total - wins)]]
    p_value = float(stats.fisher_exact(table).pvalue)
    lines.append(
        "The runs are not matched one to one, so all labels are taken as exchangeable: exact "
        f"{probability(p_value)}. That holds only if both methods ran at the same settings."
    )
    return lines


def _all_matched(treated: BoolArray, pair: Sequence[tuple[str, ...]]) -> bool:
    """Whether every pair has one run of each method."""
    sides = [{key for key, t in zip(pair, treated, strict=True) if t == side} for side in (True, False)]
    return sides[0] == sides[1] and len(pair) == 2 * len(sides[0])


def audit(path: Path | None, share: str | None, control: str | None) -> list[str]:
    """The lines `python -m analysis audit` prints.

    Args:
        path: The points' CSV file, or None.
        share: "k/n" in its place, or None.
        control: The method the others are compared with, for points.

    Raises:
        ConfigurationError: If not exactly one of path and share is given, or either cannot be used.
    """
    if (path is None) == (share is None):
        raise ConfigurationError("give either a CSV file of points or --share K/N")
    if path is None:
        assert share is not None
        return audit_share(*read_share(share))
    if control is None:
        raise ConfigurationError("--control is missing; name the method that the others are compared with")
    points = read_points(path)
    lost = sum(not math.isfinite(value) for value in points.kl + points.reward)
    told = [f"{count(lost, 'run')} diverged: never on the frontier."] if lost else []
    return [*told, *audit_points(points, control)]
