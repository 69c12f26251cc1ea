"""Audit of published results: a share of a Pareto frontier, or points (method, KL, reward)."""

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from analysis.results.store import DamagedFileError, read_bytes
from analysis.stats import frontier
from analysis.stats.claims import OBJECTIVE
from analysis.stats.comparison import corrected, secondary_findings
from analysis.stats.contrast import objective_contrast
from analysis.stats.matched_kl import matched_kl
from analysis.stats.pairs import BoolArray, Pairs
from analysis.stats.swaps import mean_swap_test, unit_sums
from analysis.stats.text import count, interval_text, number, probability, signed
from analysis.stats.verdict import Verdict
from lit_klrb.errors import ConfigurationError
from replication.audit_share import ALPHA, audit_share, read_share, settle

COLUMNS = ("method", "kl", "reward")
# Columns with a meaning beyond matching runs.
BETA, SEEDS = "beta", ("seed", "replicate")

Key = tuple[str, ...]


class PublishedRun(NamedTuple):
    """A published run.

    Args:
        method: The name of its method.
        kl: KL in nats; `nan` if it diverged.
        reward: Mean reward.
        columns: Its further columns, by which runs are matched: name -> text.
    """

    method: str
    kl: float
    reward: float
    columns: dict[str, str]

    def key(self, without: str | None = None) -> Key:
        """What the run is matched by: its further columns, except one."""
        return tuple(text for name, text in self.columns.items() if name != without)


def read_points(path: Path, match: Sequence[str] | None = None) -> list[PublishedRun]:
    """Read points from a CSV file with the columns method, kl and reward.

    Args:
        path: The file; blanks around values are ignored.
        match: Columns whose values match runs in pairs; None for all others.

    Raises:
        ConfigurationError: If a column is missing or a value is not a number; names its line.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")  # spreadsheets begin a file with a byte order mark
        reader = csv.DictReader(io.StringIO(text, newline=""))
        header = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = header
        lines = dict(
            (
                reader.line_num,
                {name: (text or "").strip() for name, text in row.items() if isinstance(name, str)},
            )
            for row in reader
        )
    except DamagedFileError as error:
        raise ConfigurationError(str(error)) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from None
    missing = [name for name in COLUMNS if name not in header]
    if missing or not lines:
        raise ConfigurationError(
            f"{path}: {'has no column ' + missing[0] if missing else 'has no rows'}; the columns "
            f"{', '.join(COLUMNS)} are expected, and others that match runs in pairs, such as beta and seed"
        )
    others = [name for name in header if name not in COLUMNS]
    unknown = [name for name in match or () if name not in others]
    if unknown:
        raise ConfigurationError(
            f"--match {unknown[0]}: {path} has the columns {', '.join(others) or 'none'}"
        )
    used = others if match is None else match
    points = []
    for line, row in lines.items():
        place = f"{path}, line {line}"
        kl, reward = (_number(place, name, row[name]) for name in COLUMNS[1:])
        if BETA in used and not math.isfinite(_number(place, BETA, row[BETA])):
            raise ConfigurationError(f"{place}: {BETA} is {row[BETA]!r}; a finite number expected")
        points.append(PublishedRun(row["method"], kl, reward, {name: row[name] for name in used}))
    return points


def _number(place: str, column: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{place}: {column} is {text!r}; a number expected") from None


def audit_points(points: Sequence[PublishedRun], control: str) -> list[str]:
    """Lines on the evidence of the points for each other method against the control.

    Raises:
        ConfigurationError: If there is no such method, or no other.
    """
    methods = list(dict.fromkeys(point.method for point in points))
    others = [name for name in methods if name != control]
    if control not in methods or not others:
        raise ConfigurationError(
            f"--control {control}: the file has the methods {', '.join(methods)}; name one of at least two"
        )
    groups = {name: [point for point in points if point.method in (name, control)] for name in others}
    matched = {name: _matched(group, name, control) for name, group in groups.items()}
    designs = [pairs for pairs in matched.values() if pairs]
    tests = _verdicts(designs, BETA in points[0].columns)
    lines = _repeated(points)
    for name, pairs in matched.items():
        treated = np.array([point.method == name for point in groups[name]])
        kl, reward = np.array([(point.kl, point.reward) for point in groups[name]]).T
        member = frontier.nondominated(kl, reward)
        wins, total = int((member & treated).sum()), int(member.sum())
        lines.append(f"{name} against {control}: {wins} of {count(total, 'frontier point')}.")
        if pairs is None:
            lines += [*_unmatching(groups[name], name), _unmatched(wins, total, treated)]
            continue
        lines += _frontier(name, pairs)
        lines += [f"  {one.claim.key}: {one.sentence}" for one in tests if one.treatment == name]
        lines.append(f"  matched_kl, described: {_matched_kl(pairs)}")
    if tests:
        lines.append(
            f"p-values are corrected over {len(tests)} tests, and intervals are simultaneous. The tests are "
            "exploratory, as none was planned."
        )
    caveat = "A larger share also comes from a larger spread between runs; it does not make a method better."
    return [*lines, caveat]


def _repeated(points: Sequence[PublishedRun]) -> list[str]:
    """A warning of runs with the same numbers, which may be copies of one."""
    outcomes = Counter(point[:3] for point in points)
    copies = sum(number - 1 for (_, *outcome), number in outcomes.items() if np.isfinite(outcome).all())
    if not copies:
        return []
    return [
        f"{count(copies, 'run')} with exactly the KL and reward of another run of the same method. "
        "Copies are no further evidence, but are counted here."
    ]


def _matched(points: Sequence[PublishedRun], name: str, control: str) -> Pairs | None:
    """The matched pairs of two methods; None if the runs do not match one to one."""
    if not points[0].columns or not _one_to_one(points, name):
        return None
    run = {(point.method, point.key()): point for point in points}
    both = [(run[name, key], run[control, key]) for key in dict.fromkeys(point.key() for point in points)]
    ours = [one.columns for one, _ in both]
    betas = np.array([float(columns.get(BETA, 0.0)) for columns in ours])
    index = np.unique(betas, return_inverse=True)[1]
    # Without seeds, the pairs of a beta are numbered
    replicate = np.array([int((index[:i] == index[i]).sum()) for i in range(len(both))])
    unit = np.arange(len(both))
    if (seed := next((column for column in SEEDS if column in ours[0]), None)) is not None:
        replicate = np.unique([columns[seed] for columns in ours], return_inverse=True)[1]
        if len(np.unique(replicate)) < len(both):
            unit = replicate
    kl, reward = (
        np.array([[one.kl, other.kl] for one, other in both]),
        np.array([[one.reward, other.reward] for one, other in both]),
    )
    return Pairs(name, control, betas, index, replicate, unit, kl, reward)


def _one_to_one(points: Sequence[PublishedRun], name: str, without: str | None = None) -> bool:
    """Whether every key has one run of each method."""
    sides = [
        Counter(point.key(without) for point in points if (point.method == name) == side)
        for side in (True, False)
    ]
    return sides[0] == sides[1] and set(sides[0].values()) == {1}


def _verdicts(designs: Sequence[Pairs], with_beta: bool) -> list[Verdict]:
    """All verdicts for which there are columns, as one family."""
    found = []
    for pairs in designs:
        if with_beta:
            found.append(Verdict.on(OBJECTIVE, pairs, objective_contrast(pairs)))
        found += secondary_findings(pairs, "objective")
    return corrected(found, ALPHA)


def _matched_kl(pairs: Pairs) -> str:
    found = matched_kl(pairs)
    interval = interval_text(found.estimate.interval())
    return found.refused or f"difference in reward {signed(found.estimate.value)}, {interval}"


def _frontier(name: str, pairs: Pairs) -> list[str]:
    member = frontier.pooled_frontier(pairs).astype(np.float64)
    contributions = member[:, 0] - member[:, 1]
    ahead, discordant = int((contributions > 0).sum()), int((contributions != 0).sum())
    sums = unit_sums(contributions, pairs.unit)
    p_value = mean_swap_test(sums[sums != 0]).p_value
    lines = [
        f"{count(len(pairs), 'matched pair')}, {discordant} with exactly one run on the frontier, {ahead} of "
        f"these {name}'s: exact swap {probability(p_value)}."
    ]
    if pairs.seeds_shared:
        blocks = len(np.unique(pairs.unit))
        lines.append(
            "Pairs share seeds, so all pairs of a seed are swapped together. The smallest attainable p with "
            f"{blocks} seeds is {number(min(1.0, 2.0 ** (1 - blocks)), 2)}."
        )
        return lines
    return [*lines, settle(ahead, discordant)]


def _unmatching(points: Sequence[PublishedRun], name: str) -> list[str]:
    """Warnings about columns without which the runs would match one to one."""
    columns = points[0].columns
    return [
        f"WARNING: the runs do not match because of the column {column}; without it they match one to one."
        for column in (columns if len(columns) > 1 else ())
        if _one_to_one(points, name, column)
    ]


def _unmatched(wins: int, total: int, treated: BoolArray) -> str:
    table = [[wins, total - wins], [int(treated.sum()) - wins, int((~treated).sum()) - (total - wins)]]
    p_value = float(stats.fisher_exact(table).pvalue)
    return (
        "The runs are not matched one to one, so all labels are assumed to be exchangeable: exact "
        f"{probability(p_value)}. This is valid only if both methods ran with the same settings."
    )


def audit(
    path: Path | None, share: str | None, control: str | None, match: Sequence[str] | None = None
) -> list[str]:
    """The lines of `python -m replication audit`.

    Args:
        path: The CSV file of the points, or None.
        share: A share "k/n" instead of points, or None.
        control: The method with which the others are compared; for points only.
        match: Columns that match runs in pairs; None for all but method, kl and reward. For points only.

    Raises:
        ConfigurationError: If not exactly one of path and share is given, or either cannot be used.
    """
    if (path is None) == (share is None):
        raise ConfigurationError("give either a CSV file of points or --share K/N")
    if path is None:
        assert share is not None
        if match is not None:
            raise ConfigurationError(f"--match {','.join(match)} needs a CSV file of points")
        return audit_share(*read_share(share))
    if control is None:
        raise ConfigurationError("--control is missing; name the method that the others are compared with")
    points = read_points(path, match)
    lost = sum(not math.isfinite(point.kl + point.reward) for point in points)
    note = [f"{count(lost, 'run')} diverged: never on the frontier."] if lost else []
    return [*note, *audit_points(points, control)]
