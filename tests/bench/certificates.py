"""Size and power of every test of `analysis`, beside those of the wrong tests that are often used instead."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import stats

from analysis.stats.attainment import hypervolume_test
from analysis.stats.gradients import disjoint_differences, squared_distances
from analysis.stats.power import STANDARD, Rate, rejection_rates, swap_p_values
from analysis.stats.stability import spread_test

from .table import markdown

sys.path.append(str(Path(__file__).parents[1] / "analysis" / "stats"))
from generators import draw_curves, draw_gradients

SUMS = ("T1", "T2", "T6", "T3", "T4", "T5")
# Fixed in advance, beyond what the scenario's runs reach.
CORNER = (60.0, -0.5)
LEVEL = 0.05


def report(quick: bool) -> str:
    """Three tables as Markdown."""
    repetitions = 20 if quick else 1_000
    intro = (
        f"Shares of rejections at {LEVEL:.0%} in simulated data, ± one Monte-Carlo standard error (at a true "
        f"{LEVEL:.0%} and {repetitions:,} repetitions ± {Rate(LEVEL, repetitions).error:.3f}; T7 and the "
        "last table have a quarter of them). S counts replicates, B batches of gradients."
    )
    return "\n\n".join([intro, _sweeps(repetitions), _gradients(repetitions), _stability(repetitions // 4)])


def _cell(rejected: Iterable[bool]) -> str:
    """A share of rejections with its error."""
    hits = np.asarray(list(rejected))
    rate = Rate(float(hits.mean()), len(hits))
    return f"{rate.value:.3f} ± {rate.error:.3f}"


def _sweeps(repetitions: int) -> str:
    """Swap tests on (KL, reward) outcomes: six betas, pairs swapped one by one, one-sided."""
    cases: dict[str, dict[str, float]] = {
        "no difference": {},
        "no difference in mean, control's noise × 2: it is called better": {"spread": 2.0},
        "reward + 0.5 SD": {"lift": 0.5},
        "reward + 0.5 SD, control's noise × 1.5": {"lift": 0.5, "spread": 1.5},
    }
    rows = []
    for label, settings in cases.items():
        alternative = "less" if "called" in label else "greater"
        for count in (5, 10, 20):
            scenario = replace(STANDARD, replicates=count)
            rates = rejection_rates(
                scenario, SUMS, alternative=alternative, sweeps=repetitions, alpha=LEVEL, **settings
            )
            cells = [f"{rates[key].value:.3f} ± {rates[key].error:.3f}" for key in SUMS]
            rng = np.random.default_rng(1)
            volumes = []
            for _ in range(repetitions // 4):
                found = hypervolume_test(scenario.simulate(rng, **settings), CORNER, resamples=199)
                upper = found.differences.sum() > 0
                one_sided = found.test.p_value / 2
                volumes.append(one_sided <= LEVEL and upper == (alternative == "greater"))
            rows.append([label, str(count), *cells, _cell(volumes)])
    return "### Swap tests of a sweep\n\n" + markdown(["truth", "S", *SUMS, "T7"], rows)


def _gradients(repetitions: int) -> str:
    """Gradient variance from Gram matrices, beside the wrong tests; two-sided."""
    cases: dict[str, tuple[str, float]] = {
        "exchangeable, heavy tails": ("heavy", 1.0),
        "equal trace, other spectrum": ("flat", 1.0),
        "equal trace, other tails": ("tails", 1.0),
        "trace × 0.9": ("heavy", 0.9),
        "trace × 0.8": ("heavy", 0.8),
    }
    rows = []
    for label, (kind, ratio) in cases.items():
        for batches in (16, 64, 128):
            rng = np.random.default_rng(2)
            grams = [draw_gradients(rng, batches, kind, ratio=ratio) for _ in range(repetitions)]
            distances = [squared_distances(gram) for gram in grams]
            centred = swap_p_values(np.array([d[1] - d[0] for d in distances]))
            pairs = swap_p_values(np.array([disjoint_differences(gram) for gram in grams]))
            wrong = [[test(gram) <= LEVEL for gram in grams] for test in WRONG.values()]
            rows.append(
                [label, str(batches), *map(_cell, (pairs <= LEVEL, centred <= LEVEL)), *map(_cell, wrong)]
            )
    header = ["truth", "B", "disjoint pairs", "centred", *(f"wrong: {name}" for name in WRONG)]
    return "### Gradient variance\n\n" + markdown(header, rows)


def _norms(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ours, theirs = np.sqrt(squared_distances(gram))
    return ours, theirs


def _pitman_morgan(gram: np.ndarray) -> float:
    ours, theirs = _norms(gram)
    return float(stats.pearsonr(ours + theirs, ours - theirs).pvalue)


def _brown_forsythe(gram: np.ndarray) -> float:
    return float(stats.levene(*_norms(gram), center="median").pvalue)


def _paired_logs(gram: np.ndarray) -> float:
    ours, theirs = np.log(squared_distances(gram))
    return float(stats.ttest_rel(ours, theirs).pvalue)


WRONG: dict[str, Callable[[np.ndarray], float]] = {
    "Pitman-Morgan on norms": _pitman_morgan,
    "Brown-Forsythe on norms": _brown_forsythe,
    "paired t of log distances": _paired_logs,
}


def _stability(repetitions: int) -> str:
    """Spread between replicates over training, beside pointwise tests as shaded bands suggest them."""
    cases = {
        "equal spread, Gaussian": {"noise": "gaussian"},
        "equal spread, t5": {"noise": "t5"},
        "equal spread, heavy scale of each run": {"noise": "scale"},
        "control's variance × 4": {"ratio": 4.0},
    }
    rows = []
    for label, settings in cases.items():
        for count in (5, 10, 20):
            rng = np.random.default_rng(3)
            units, levels = np.arange(count), np.zeros(count, dtype=np.int64)
            anywhere, average, pointwise = [], [], []
            for _ in range(repetitions):
                curves = draw_curves(rng, count, **settings)
                found = spread_test(curves, levels, units, resamples=199)
                steadier = found.mean.value > 0
                anywhere.append(found.pointwise.p_value <= LEVEL)
                average.append(found.integrated.p_value / 2 <= LEVEL and steadier)
                tests = [stats.levene(*curves[..., t].T, center="median").pvalue for t in range(50)]
                pointwise.append(min(tests) <= LEVEL)
            rows.append([label, str(count), *map(_cell, (average, anywhere, pointwise))])
    header = ["truth", "S", "D2, one-sided", "D1", "wrong: Brown-Forsythe at any step"]
    return "### Spread between replicates\n\n" + markdown(header, rows)
