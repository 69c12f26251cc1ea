"""Size and coverage off the null: curved frontiers, and rates that were chosen."""

from collections.abc import Callable, Sequence

import numpy as np

from analysis.stats import Pairs
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import matched_kl
from analysis.stats.swaps import mean_swap_test
from analysis.stats.tuning import resampled

from .table import markdown

LEVEL = 0.05
Curved = Callable[[np.ndarray], np.ndarray]


def rate(hits: Sequence[bool] | np.ndarray) -> str:
    """A share with its Monte-Carlo error."""
    found = np.asarray(hits, dtype=float)
    share = float(found.mean())
    return f"{share:.3f} ± {np.sqrt(share * (1 - share) / len(found)):.3f}"


# --- reward at matched KL -----------------------------------------------------------------------------------


def _hump(width: float) -> Curved:
    return lambda kl: np.exp(-0.5 * (np.log(kl / 2.3) / width) ** 2)


FRONTIERS: dict[str, Curved] = {"√KL": np.sqrt, "hump": _hump(0.7), "narrow hump": _hump(0.5)}


def frontiers(repetitions: int) -> str:
    """Coverage of the gap at matched KL on frontiers that rise and fall; a true gap of 0.3."""
    rows = []
    for name, curve in FRONTIERS.items():
        for betas, replicates in (((0.05, 0.1, 0.2, 0.4), 6), ((0.1, 0.3), 10)):
            for ratio in (1.0, 0.85, 0.7, 0.5):
                fits = [
                    _fit(np.random.default_rng([8, i]), curve, betas, replicates, ratio)
                    for i in range(repetitions)
                ]
                shown = [one for one in fits if one is not None]
                rows.append(
                    [
                        name,
                        str(len(betas)),
                        f"{ratio:g}",
                        f"{1 - len(shown) / len(fits):.2f}",
                        _covers(shown, 0.3),
                    ]
                )
    header = ["frontier", "betas", "KL ratio", "refused", "coverage"]
    return "### Reward at matched KL on curved frontiers\n\n" + markdown(header, rows)


def _fit(
    rng: np.random.Generator, curve: Curved, betas: tuple[float, ...], replicates: int, ratio: float
) -> Estimate | None:
    index, replicate = np.divmod(np.arange(len(betas) * replicates), replicates)
    beta = np.array(betas)[index]
    noise = np.sqrt(0.3) * rng.normal(size=(2, len(index), 1)) + np.sqrt(0.7) * rng.normal(
        size=(2, len(index), 2)
    )
    kl = 0.3 / beta[:, None] * np.array([ratio, 1.0]) * np.exp(0.15 * noise[0])
    reward = curve(kl) + 0.1 * noise[1] + np.array([0.3, 0.0])
    found = matched_kl(Pairs("a", "b", beta, index, replicate, np.arange(len(index)), kl, reward))
    return None if found.refused else found.estimate


def _covers(estimates: list[Estimate], truth: float) -> str:
    ends = [one.interval() for one in estimates]
    return rate([one is not None and one.low <= truth <= one.high for one in ends]) if ends else "–"


# --- rates --------------------------------------------------------------------------------------------------

RATES = np.log([1.0, 2.0, 4.0, 8.0, 16.0])
# Name -> for each arm: log rate of its optimum, and how fast J falls off; a cliff falls off faster above.
OPTIMA = {
    "both optima at a rate, flat": ((RATES[2], 0.05, 0.0), (RATES[2], 0.05, 0.0)),
    "two steps apart": ((RATES[1], 0.15, 0.0), (RATES[3], 0.15, 0.0)),
    "one between rates": ((RATES[2] + 0.35, 0.3, 0.0), (RATES[2], 0.3, 0.0)),
    "steep and flat": ((RATES[2] + 0.35, 0.5, 0.0), (RATES[1] + 0.2, 0.03, 0.0)),
    "cliffs above the optima": ((RATES[2] + 0.35, 0.2, 1.5), (RATES[1], 0.05, 1.5)),
}


def rates(repetitions: int) -> str:
    """Coverage and width of the difference between two arms at their true best rates, and power."""
    rows = []
    for name, arms in OPTIMA.items():
        for seeds, replicates in ((4, 10), (4, 30), (8, 10)):
            rng = np.random.default_rng(11)
            found = [_tuned(rng, arms, seeds, replicates) for _ in range(repetitions)]
            cells = [str(seeds), str(replicates)]
            for errors in np.array(found).transpose(1, 2, 0):  # of the ends of both intervals
                low, high = errors
                power = rate((low + _LIFT > 0) | (high + _LIFT < 0))
                cells += [rate((low <= 0) & (high >= 0)), f"{(high - low).mean() / 2:.3f}", power]
            rows.append([name, *cells])
    header = ["optima", "tuning seeds", "replicates"]
    header += [f"{which}: {what}" for which in ("chosen rates", "best rates") for what in _MEASURED]
    return (
        "### The difference between arms at their best rates\n\nFive rates; the SD of a run is 0.1, the "
        "runs of a seed correlate by 0.3. Width is half the mean length of the interval, power that for "
        f"a difference of {_LIFT:g}. An arm at an edge of the rates adds nothing: the difference is that at "
        "this rate.\n\n" + markdown(header, rows)
    )


_LIFT, _MEASURED = 0.15, ("coverage", "width", "power")


def _outcome(at: np.ndarray, arm: tuple[float, float, float]) -> np.ndarray:
    best, fall, cliff = arm
    return -fall * (at - best) ** 2 - cliff * np.maximum(0.0, at - best - 0.7) ** 2


def _tuned(
    rng: np.random.Generator, arms: tuple[tuple[float, float, float], ...], seeds: int, replicates: int
) -> list[list[float]]:
    """The ends, less the truth, of the interval without and with the choice of rates."""
    true = np.array([_outcome(RATES, arm) for arm in arms])
    noise = np.sqrt(0.3) * rng.normal(size=(seeds, 1, 1)) + np.sqrt(0.7) * rng.normal(
        size=(seeds, 2, len(RATES))
    )
    trials = true + 0.1 * noise
    chosen = trials.mean(axis=0).argmax(axis=1)
    drawn = rng.integers(seeds, size=(400, seeds))
    inside = (chosen > 0) & (chosen < len(RATES) - 1)
    lost = np.zeros((2, 400))
    for arm in np.flatnonzero(inside):
        _, best, own = resampled(trials[:, arm], RATES, int(chosen[arm]), drawn)
        lost[arm] = np.maximum(0.0, best - own)
    at = true[[0, 1], chosen]
    runs = 0.1 * np.sqrt(0.7) * rng.normal(size=(replicates, 2)) + at
    truth = np.where(inside, 0.0, at) @ [1.0, -1.0]
    found = []
    for variance in (0.0, float(((lost[0] - lost[1]) ** 2).mean())):
        interval = mean_swap_test(runs @ [1.0, -1.0], variance=variance, resamples=1_999).interval(LEVEL)
        found.append([end - truth for end in (interval.ends if interval else (-np.inf, np.inf))])
    return found
