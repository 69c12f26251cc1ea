"""Comparison of two sweeps: means of all arms, and unpaired differences between arms."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from analysis.checks import load_sweep
from analysis.report.elements import Table
from analysis.report.matching import arm_outcomes
from analysis.results.records import OBJECTIVE
from analysis.results.sweep import Sweep
from analysis.stats.comparison import one_step
from analysis.stats.intervals import Estimate, weighted_sum
from analysis.stats.pairs import FloatArray
from analysis.stats.text import count, interval_text, number, signed
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

_CAUTION = (
    "The runs of two sweeps are not matched: a difference may be due to anything else that differs between "
    "them, such as checkpoints, prompts, seeds, evaluation or code. Differences are between means of "
    "replicates over common betas, with Welch's intervals; these and p-values are corrected over all rows."
)


def side_by_side(first: Path, second: Path) -> tuple[list[str], list[Table]]:
    """Compare two sweeps.

    Args:
        first: Directory of a sweep.
        second: Directory of another sweep. Each of its arms is compared with the arm of the same label in the
            first sweep, or with the control of the first sweep if there is none.

    Returns:
        What differs between the sweeps, and the comparison as tables.

    Raises:
        ConfigurationError: If both are the same sweep, or one has no results.
    """
    if first.resolve() == second.resolve():
        raise ConfigurationError(f"{first} and {second} are the same directory; two sweeps are expected")
    sweeps = load_sweep(first), load_sweep(second)
    names = [sweep.plan.name for sweep in sweeps]
    if len({*names}) == 1:
        names = [str(sweep.directory) for sweep in sweeps]
    arms = Table(
        "Mean over replicates with its 95% t interval, of runs that did not diverge.",
        ("Sweep", "Arm", "β", "n", "Diverged", "Reward", "KL (nats)", "J"),
        [row for sweep, name in zip(sweeps, names, strict=True) for row in _arm_rows(sweep, name)],
    )
    return [_CAUTION, *_unlike(*sweeps, names)], [arms, _differences(*sweeps, names)]


def arm_differences(first: Sweep, second: Sweep) -> dict[str, tuple[str, Estimate]]:
    """Arm of the second sweep -> its counterpart in the first, and the difference in J after Welch.

    The difference is that of means over replicates; `nan` without a common beta.
    """
    differences = {}
    for label in second.plan.grid.arms:
        counterpart = label if label in first.plan.grid.arms else first.plan.primary.control
        betas = common_betas(first, second)
        means = [replicate_means(sweep, arm, betas) for sweep, arm in ((second, label), (first, counterpart))]
        parts = [(sign, Estimate.of_mean(one)) for sign, one in zip((1.0, -1.0), means, strict=True)]
        differences[label] = counterpart, weighted_sum(parts) if betas else Estimate(math.nan)
    return differences


def common_betas(first: Sweep, second: Sweep) -> list[float]:
    """The weights of the KL that both sweeps have."""
    return sorted({*first.plan.grid.beta.values()} & {*second.plan.grid.beta.values()})


def replicate_means(sweep: Sweep, arm: str, betas: Sequence[float]) -> FloatArray:
    """J of each complete replicate, averaged over betas.

    Replicates are independent even if seeds are shared across betas. A replicate with a diverged or missing
    run is left out, as it has no value that could be ranked among the runs of another sweep.
    """
    by_replicate: dict[int, dict[float, float]] = {}
    for run in sweep.grid.values():
        if run.point.arm == arm and run.point.beta in betas and not run.diverged:
            by_replicate.setdefault(run.point.replicate, {})[run.point.beta] = run.outcome(OBJECTIVE)
    complete = [values for _, values in sorted(by_replicate.items()) if len(values) == len(betas)]
    return np.array([np.mean(list(values.values())) for values in complete])


def _arm_rows(sweep: Sweep, name: str) -> Iterator[tuple[str, ...]]:
    labels = list(sweep.plan.grid.arms)
    outcomes = arm_outcomes(sweep, (schema.REWARD, schema.KL, OBJECTIVE))
    for one in sorted(outcomes, key=lambda one: (labels.index(one.label), one.beta)):
        means = map(_mean_text, one.means.values())
        yield (name, one.label, f"{one.beta:g}", str(one.n), str(one.diverged), *means)


def _mean_text(mean: Estimate) -> str:
    interval = mean.interval()
    half = "" if interval is None else f" ± {number(interval.high - mean.value, 2)}"
    return number(mean.value) + half


def _differences(first: Sweep, second: Sweep, names: Sequence[str]) -> Table:
    differences = arm_differences(first, second)
    withheld = bool(first.invalid or second.invalid or _shared(first, second))
    p_values = one_step([estimate.p_value for _, estimate in differences.values()])
    level = 1 - 0.05 / max(1, int((~np.isnan(p_values)).sum()))
    betas = ", ".join(f"{beta:g}" for beta in common_betas(first, second))
    rows = [
        (
            *(label, counterpart, betas or "none", signed(estimate.value)),
            interval_text(estimate.interval(level)) if betas else "no interval: no common β",
            "withheld" if withheld else number(float(p_value), 2),
        )
        for (label, (counterpart, estimate)), p_value in zip(differences.items(), p_values, strict=True)
    ]
    caption = f"Difference in J: arms of {names[1]} minus arms of {names[0]}."
    return Table(caption, ("Arm", "Against", "Common β", "Difference", "Interval", "p (Welch)"), rows)


def _unlike(first: Sweep, second: Sweep, names: Sequence[str]) -> list[str]:
    """Known differences between the sweeps, and problems of either."""
    sweeps = zip(names, (first, second), strict=True)
    texts = [f"{name}: {problem.text}" for name, sweep in sweeps for problem in sweep.problems]
    if shared := _shared(first, second):
        texts.append(f"{count(shared, 'result')} of the grids are in both: the sweeps are not independent.")
    before, after = _settings(first), _settings(second)
    other = [
        f"{key} ({before[key]}; {after[key]})" for key in before if before[key] != after.get(key, before[key])
    ]
    if other:
        texts.append(f"Different hyperparameters: {', '.join(other)}.")
    for name, of in (
        ("setting", lambda sweep: sweep.plan.setting),
        ("reference and warm start", _starts),
        ("versions", _versions),
    ):
        one, another = of(first), of(second)
        if one != another:
            texts.append(f"Different {name}: {one or 'none given'}; {another or 'none given'}.")
    return texts


def _shared(first: Sweep, second: Sweep) -> int:
    """Number of results of the grid that both sweeps have."""
    one, other = ({run.checksum for run in sweep.grid.values()} for sweep in (first, second))
    return len(one & other)


def _settings(sweep: Sweep) -> dict[str, str]:
    """The hyperparameters that all runs of the grid share."""
    settings = [set(run.settings.items()) for run in sweep.grid.values() if run.settings]
    return dict(sorted(set.intersection(*settings))) if settings else {}


def _starts(sweep: Sweep) -> str:
    """The checkpoints that runs start from, by a hash of their cells' ids."""
    needs = sorted({need for run in sweep.grid.values() for need in run.cell.needs})
    return hashlib.sha256(" ".join(needs).encode()).hexdigest()[:12] if needs else ""


def _versions(sweep: Sweep) -> str:
    return ", ".join(sorted({f"{k} {v}" for run in sweep.runs for k, v in run.versions.items()}))
