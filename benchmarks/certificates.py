"""Size, coverage, width and power of the tests of `analysis`, and of wrong tests that are often used."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

from analysis.stats import Pairs, Rules, compare
from analysis.stats.comparison import spread_finding
from analysis.stats.gradient_noise import disjoint_halves, squared_distances
from analysis.stats.intervals import detectable
from analysis.stats.power import NULLS, swap_p_values
from analysis.stats.swaps import mean_swap_test

from .certificates_design import frontiers, rate, rates
from .table import markdown

sys.path.append(str(Path(__file__).parents[1] / "tests" / "analysis" / "stats"))
from generators import draw_gradients

LEVEL = 0.05


def report(quick: bool) -> str:
    """Tables as Markdown."""
    repetitions = 40 if quick else 2_000
    error = math.sqrt(LEVEL * (1 - LEVEL) / repetitions)
    intro = (
        f"`python -m benchmarks certificates`: shares of {repetitions:,} simulated data sets, of "
        f"{repetitions // 4} for gradients, matched KL, rates and spreads, ± one Monte-Carlo standard error, "
        f"at a level of {LEVEL:.0%} ({error:.3f} at a true {LEVEL:.0%})."
    )
    parts = [_differences(repetitions), _prompts(repetitions), _spread(repetitions)]
    return "\n\n".join([intro, *parts, *(make(repetitions // 4) for make in (frontiers, rates, _gradients))])


def _differences(sweeps: int) -> str:
    """The two tests of single differences, and what a first sweep says that a second one detects."""
    rows = []
    for name, draw in NULLS.items():
        for count in (4, 6, 8, 12):
            first, second = draw(np.random.default_rng(count), (2 * sweeps, count)).reshape(2, sweeps, count)
            errors = first.std(axis=1, ddof=1) / math.sqrt(count)
            least = 2.0 ** (1 - count)
            known, now, before = (
                detectable(count, LEVEL, *by)
                for by in ((0.0, math.inf), (0.0, count - 1.0), (least, count - 1.0))
            )
            t_p = stats.ttest_1samp(first, 0.0, axis=1).pvalue
            halves = {"t": stats.t.ppf(1 - LEVEL / 2, count - 1) * errors.mean(), "swaps": _half(first[:400])}
            for test, p_values, reach in (("t", t_p, now), ("swaps", swap_p_values(first), before)):
                better = (p_values <= LEVEL) & (first.sum(axis=1) > 0)
                cells = [rate(p_values <= LEVEL), rate(better), rate(p_values > LEVEL)]
                cells.append("–" if halves[test] is None else f"{halves[test]:.2f}")
                cells += [_power(second, by and by * errors, test) for by in (reach, known)]
                rows.append([name, str(count), test, *cells])
    header = ["differences, of mean 0", "pairs", "test", "rejects", "“better”", "coverage", "width"]
    header += ["power, promised .80", "the same with a pilot's SD taken as known"]
    return (
        "### Single differences\n\nThe t test decides, and swaps stand beside it. Coverage is of the mean; "
        "width is half the mean length of the interval. A dash: a test of so few pairs cannot reject, and "
        "promises nothing.\n\n" + markdown(header, rows)
    )


def _half(sweeps: np.ndarray) -> float | None:
    """Half the mean length of the interval by swaps; None if there is none."""
    intervals = [mean_swap_test(values).interval(LEVEL) for values in sweeps]
    found = [one.high - one.low for one in intervals if one is not None]
    return float(np.mean(found)) / 2 if found else None


def _power(sweeps: np.ndarray, effects: np.ndarray | None, test: str) -> str:
    """The power of a test of sweeps that are shifted by effects; a dash without effects."""
    if effects is None:
        return "–"
    shifted = sweeps + effects[:, None]
    by_t = test == "t"
    return rate((stats.ttest_1samp(shifted, 0.0, axis=1).pvalue if by_t else swap_p_values(shifted)) <= LEVEL)


# Standard deviations of a difference over seeds, over prompts, and of the rest.
EFFECTS = {
    "seeds alone": (1.0, 0.0, 1.0),
    "prompts as much as seeds": (0.35, 1.0, 1.0),
    "prompts alone": (0.0, 1.0, 0.3),
}


def _prompts(sweeps: int) -> str:
    """Coverage of the difference on other prompts, by the interval over seeds and by that over both."""
    rows = []
    for name, (of_seed, of_prompt, rest) in EFFECTS.items():
        for seeds, prompts in ((8, 24), (8, 128), (12, 32)):
            rng, hits, widths = np.random.default_rng(1), [], []
            for _ in range(sweeps):
                found = of_seed * rng.normal(size=(seeds, 1)) + of_prompt * rng.normal(size=prompts)
                found = found + rest * rng.normal(size=(seeds, prompts))
                reward = np.stack([found.mean(axis=1), np.zeros(seeds)], axis=1)
                place, zeros = np.arange(seeds), np.zeros(seeds, dtype=np.int64)
                pairs = Pairs(
                    "a", "b", np.ones(seeds), zeros, place, place, np.zeros((seeds, 2)), reward, prompts=found
                )
                verdict = compare([pairs], Rules())[0].primary
                assert verdict.over_prompts is not None
                both = [verdict.interval, verdict.over_prompts.interval()]
                hits.append([one is not None and one.low <= 0 <= one.high for one in both])
                widths.append([0.0 if one is None else one.high - one.low for one in both])
            over, half = np.array(hits).T, np.mean(widths, axis=0) / 2
            cells = [
                cell for one, width in zip(over, half, strict=True) for cell in (rate(one), f"{width:.2f}")
            ]
            rows.append([name, str(seeds), str(prompts), *cells])
    header = ["differences vary over", "seeds", "prompts", "over seeds: coverage", "width"]
    return (
        "### The difference on other prompts\n\nCoverage of the mean over seeds and prompts.\n\n"
        + markdown([*header, "over seeds and prompts: coverage", "width"], rows)
    )


def _spread(sweeps: int) -> str:
    """Size and power of the test of the spread of runs."""
    rows = []
    draws: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
        "normal": lambda rng, shape: rng.normal(size=shape),
        "t with 3 degrees of freedom": lambda rng, shape: rng.standard_t(3, size=shape),
    }
    for name, draw in draws.items():
        for count in (6, 8, 12, 20):
            cells = []
            for ratio in (1.0, 2.0, 4.0):
                rng = np.random.default_rng(count)
                values = draw(rng, (sweeps // 4, count, 2)) * np.array([1.0, math.sqrt(ratio)])
                place, zeros = np.arange(count), np.zeros(count, dtype=np.int64)
                where = np.ones(count), zeros, place, place, np.zeros((count, 2))
                tests = [spread_finding(Pairs("a", "b", *where, one), "objective").test for one in values]
                cells.append(rate([test.p_value <= LEVEL for test in tests]))
            rows.append([name, str(count), *cells])
    header = ["runs", "pairs", "equal spreads", "variance of the control × 2", "× 4"]
    return "### The spread of runs\n\n" + markdown(header, rows)


def _gradients(repetitions: int) -> str:
    """Gradient variance from Gram matrices, compared with the wrong tests; two-sided."""
    cases: dict[str, tuple[str, float]] = {
        "exchangeable, heavy tails": ("heavy", 1.0),
        "equal trace, other spectrum": ("spectrum", 1.0),
        "equal trace, other tails": ("tails", 1.0),
        "trace × 0.9": ("heavy", 0.9),
        "trace × 0.8": ("heavy", 0.8),
    }
    rows = []
    for label, (kind, ratio) in cases.items():
        for batches in (16, 64, 128):
            rng = np.random.default_rng(2)
            grams = [draw_gradients(rng, batches, kind, ratio=ratio) for _ in range(repetitions)]
            distances = np.array([squared_distances(gram) for gram in grams])  # [repetitions, 2, B]
            tests = [
                swap_p_values(np.array([np.subtract(*disjoint_halves(gram)) for gram in grams])),
                swap_p_values(distances[:, 1] - distances[:, 0]),
                *(test(distances[:, 0], distances[:, 1]) for test in WRONG.values()),
            ]
            rows.append([label, str(batches), *(rate(p_values <= LEVEL) for p_values in tests)])
    header = ["truth", "B", "disjoint pairs", "centred", *(f"wrong: {name}" for name in WRONG)]
    return "### Gradient variance\n\n" + markdown(header, rows)


def _pitman_morgan(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    ours, theirs = np.sqrt(ours), np.sqrt(theirs)
    return np.asarray(stats.pearsonr(ours + theirs, ours - theirs, axis=1).pvalue)


def _brown_forsythe(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return np.asarray(stats.levene(np.sqrt(ours), np.sqrt(theirs), center="median", axis=1).pvalue)


def _paired_logs(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return np.asarray(stats.ttest_rel(np.log(ours), np.log(theirs), axis=1).pvalue)


# Squared distances of both estimators [repetitions, B] to p-values [repetitions].
WRONG: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Pitman-Morgan on norms": _pitman_morgan,
    "Brown-Forsythe on norms": _brown_forsythe,
    "paired t of log distances": _paired_logs,
}
