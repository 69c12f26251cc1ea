"""Size and power of all tests of `analysis`, and of wrong tests that are often used instead."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import stats

from analysis.stats import frontier
from analysis.stats.comparison import spread_test
from analysis.stats.contrast import objective_contrast
from analysis.stats.frontier import hypervolume_differences
from analysis.stats.gradient_noise import disjoint_halves, squared_distances
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import matched_kl
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.power import Rate, swap_p_values
from analysis.stats.scenario import STANDARD, Scenario
from analysis.stats.swaps import mean_swap_test, unit_sums

from .certificates_design import blocks, frontiers, power, rates
from .certificates_primary import growth, matched, objective
from .table import markdown

sys.path.append(str(Path(__file__).parents[1] / "tests" / "analysis" / "stats"))
from generators import draw_curves, draw_gradients

# The tests whose statistic is a sum of swap contributions, positive in favour of the treatment.
SUMS: dict[str, Callable[[Pairs], FloatArray]] = {
    "frontier_share": frontier.share_contributions,
    "replicate_share": frontier.replicate_share_contributions,
    "matched_dominance": frontier.matched_dominance_contributions,
    "net_dominance": frontier.net_dominance_contributions,
    "objective": lambda pairs: (found := objective_contrast(pairs)).values * found.weights,
}
TESTS = (*SUMS, "matched_kl")
# Fixed in advance, beyond the runs of the scenario.
CORNER = (60.0, -0.5)
LEVEL = 0.05
RESAMPLES = 199


def report(quick: bool) -> str:
    """Ten tables as Markdown."""
    repetitions = 20 if quick else 500
    few = repetitions // 4
    errors = " and ".join(f"{Rate(LEVEL, count).error:.3f}" for count in (repetitions, few))
    intro = (
        f"`python -m benchmarks certificates`: shares of {repetitions:,} simulated data sets in which a "
        f"test rejects at {LEVEL:.0%}, ± one Monte-Carlo standard error; {few:,} for hypervolume, "
        f"spread and the test beside them, {4 * repetitions:,} for growth. At a true {LEVEL:.0%} the "
        f"errors are {errors}."
    )
    primary = [objective(repetitions), matched(repetitions), growth(4 * repetitions)]
    design = [make(repetitions) for make in (frontiers, power, rates, blocks)]
    tests = [_sweeps(repetitions, few), _gradients(repetitions), _stability(few)]
    return "\n\n".join([intro, *primary, *design, *tests])


def _share(rejected: Iterable[bool] | np.ndarray) -> str:
    """A share of rejections with its error."""
    hits = np.asarray(list(rejected))
    return str(Rate(float(hits.mean()), len(hits)))


def _one_sided(estimate: Estimate, upwards: bool) -> float:
    """The p-value of a t test; 1 without an estimate."""
    if not estimate.degrees > 0:
        return 1.0
    return estimate.p_value / 2 if (estimate.value > 0) == upwards else 1 - estimate.p_value / 2


def _rates(scenario: Scenario, sweeps: int, upwards: bool, settings: dict[str, float]) -> dict[str, Rate]:
    """The rate at which each test rejects on one side, in sweeps drawn from a scenario."""
    kl, reward = scenario.draw(np.random.default_rng(0), sweeps, **settings)
    drawn = list(map(scenario.pairs_of, kl, reward))
    units = scenario.unit if scenario.seeds_shared else None
    p_values = {"matched_kl": np.array([_one_sided(matched_kl(pairs).estimate, upwards) for pairs in drawn])}
    for key, contributions in SUMS.items():
        sums = np.array([unit_sums(contributions(pairs), units) for pairs in drawn])
        p_values[key] = swap_p_values(sums if upwards else -sums, two_sided=False)
    return {key: Rate(float((found <= LEVEL).mean()), sweeps) for key, found in p_values.items()}


def _sweeps(repetitions: int, few: int) -> str:
    """Swap tests on (KL, reward) outcomes: six betas, one-sided."""
    shared = replace(STANDARD, cluster=0.5)  # the runs of a replicate are correlated across betas
    cases: dict[str, tuple[Scenario, dict[str, float]]] = {
        "no difference": (STANDARD, {}),
        "no difference, seeds shared over β; wrong: pairs swapped": (shared, {}),
        "no difference, seeds shared over β; replicates swapped": (replace(shared, seeds_shared=True), {}),
        "same mean, control's noise × 2: control called better": (STANDARD, {"spread": 2.0}),
        "reward + 0.25 SD": (STANDARD, {"lift": 0.25}),
        "reward + 0.5 SD": (STANDARD, {"lift": 0.5}),
        "reward + 0.5 SD, control's noise × 1.5": (STANDARD, {"lift": 0.5, "spread": 1.5}),
    }
    rows = []
    for label, (standard, settings) in cases.items():
        upwards = "called" not in label
        for count in (5, 10, 20):
            scenario = replace(standard, replicates=count)
            rates = _rates(scenario, repetitions, upwards, settings)
            rng = np.random.default_rng(1)
            volumes = []
            for _ in range(few):
                (kl,), (reward,) = scenario.draw(rng, 1, **settings)
                found = hypervolume_differences(scenario.pairs_of(kl, reward), CORNER)
                same_side = (found.sum() > 0) == upwards
                volumes.append(same_side and mean_swap_test(found).p_value / 2 <= LEVEL)
            rows.append([label, str(count), *(str(rates[key]) for key in TESTS), _share(volumes)])
    return "### Swap tests of a sweep\n\n" + markdown(["truth", "S", *TESTS, "hypervolume"], rows)


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
            rows.append([label, str(batches), *(_share(p_values <= LEVEL) for p_values in tests)])
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


def _stability(repetitions: int) -> str:
    """Spread between replicates over training, compared with pointwise tests as in shaded bands."""
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
            units, beta_index = np.arange(count), np.zeros(count, dtype=np.int64)
            anywhere, average, pointwise = [], [], []
            for _ in range(repetitions):
                curves = draw_curves(rng, count, **settings)  # [S, 2, T]
                found = spread_test(curves, beta_index, units, resamples=RESAMPLES)
                anywhere.append(found.pointwise.p_value <= LEVEL)
                average.append(found.ratio < 0 and found.integrated.p_value / 2 <= LEVEL)
                steps = stats.levene(curves[:, 0], curves[:, 1], center="median", axis=0).pvalue
                pointwise.append((steps <= LEVEL).any())
            rows.append([label, str(count), *map(_share, (average, anywhere, pointwise))])
    header = ["truth", "S", "spread, one-sided", "spread at any step", "wrong: Brown-Forsythe at any step"]
    return "### Spread between replicates\n\n" + markdown(header, rows)
