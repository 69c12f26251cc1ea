"""Size, coverage and power of J and of the reward at matched KL, compared with earlier definitions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from analysis.stats import Pairs
from analysis.stats.contrast import mean_of, objective_contrast
from analysis.stats.intervals import Estimate, stratified_mean
from analysis.stats.matched_kl import curve_design, matched_kl
from analysis.stats.power import Rate, swap_p_values

from .table import markdown

LEVEL = 0.05
RATIOS = (1.0, 0.7, 0.5, 0.3, 0.17)
CURVES: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    np.sqrt,
    lambda kl: 1.5 * np.log1p(kl),
    lambda kl: 0.8 * kl**0.7,
    lambda kl: 2 * (1 - np.exp(-kl / 3)),
)


def rate(hits: Sequence[bool] | np.ndarray) -> str:
    """A share with its Monte-Carlo error."""
    found = np.asarray(hits, dtype=float)
    return str(Rate(float(found.mean()), len(found)))


def _equivalent(estimate: Estimate, margin: float) -> bool:
    interval = estimate.interval(1 - 2 * LEVEL)
    return interval is not None and interval.within(margin)


# --- reward at matched KL -----------------------------------------------------------------------------------


def draw(rng: np.random.Generator, ratio: float, gap: float, curve: int, unlike: bool) -> Pairs:
    """Four betas, six replicates: the treatment's KL is `ratio` times the control's, on the same curve.

    Noise: SD 0.15 on log KL, 0.1 on the reward, or 0.05, 0.1, 0.2 and 0.4 by beta if `unlike`; the runs of a
    pair correlate by 0.3.
    """
    betas, replicates = np.array([0.05, 0.1, 0.2, 0.4]), 6
    index, replicate = np.divmod(np.arange(len(betas) * replicates), replicates)
    common, own = rng.normal(size=(2, len(index), 1)), rng.normal(size=(2, len(index), 2))
    noise = np.sqrt(0.3) * common + np.sqrt(0.7) * own
    kl = 0.3 / betas[index, None] * np.array([ratio, 1.0]) * np.exp(0.15 * noise[0])
    spread = 0.05 * 2.0**index if unlike else np.full(len(index), 0.1)
    reward = CURVES[curve](kl) + spread[:, None] * noise[1] + np.array([gap, 0.0])
    return Pairs("treatment", "control", betas[index], index, replicate, np.arange(len(index)), kl, reward)


def pooled_curve(pairs: Pairs) -> tuple[Estimate, np.ndarray]:
    """The earlier definition: the mean difference of residuals of a curve fitted without the label."""
    design = curve_design(pairs.kl.ravel())
    curve = np.linalg.lstsq(design, pairs.reward.ravel(), rcond=None)[0]
    left = pairs.reward - (design @ curve).reshape(-1, 2)
    differences = left[:, 0] - left[:, 1]
    return stratified_mean(differences, np.ones(len(pairs)), pairs.beta_index), differences


class _Fits(NamedTuple):
    estimates: list[Estimate]
    p_values: list[float]

    def covers(self, gap: float) -> str:
        """The share of 95% intervals that contain the gap."""
        ends = [estimate.interval() for estimate in self.estimates]
        return rate([one is not None and one.low <= gap <= one.high for one in ends])


def matched(repetitions: int) -> str:
    """Coverage, size and power over KL ratios."""
    rows = []
    for unlike in (False, True):
        for ratio in RATIOS:
            rows.append(
                [f"{ratio:g}", "unlike" if unlike else "equal", *_matched_row(ratio, unlike, repetitions)]
            )
    header = ["KL ratio", "noise by β", "overlap", "refused", "estimate", "coverage", "size", "power at 0.1"]
    header += [f"former: {name}" for name in ("estimate", "coverage", "size", "equivalent within 0.2")]
    return (
        "### Reward at matched KL, a true gap of 0.3\n\nFits count whether they are refused or not; size and "
        "power are those of the test alone, without the gate.\n\n" + markdown(header, rows)
    )


def _matched_row(ratio: float, unlike: bool, repetitions: int) -> list[str]:
    sizes, powers, covered, former, former_size = [], [], _Fits([], []), _Fits([], []), []
    overlaps, refused = [], []
    for repetition in range(repetitions):
        curve = repetition % len(CURVES)
        for gap in (0.3, 0.0, 0.1):
            pairs = draw(np.random.default_rng([4, repetition]), ratio, gap, curve, unlike)
            if gap == 0.3:
                fit = matched_kl(pairs, least_overlap=0.0)
                covered.estimates.append(fit.estimate)
                overlaps.append(fit.overlap)
                refused.append(bool(matched_kl(pairs).refused))
                former.estimates.append(pooled_curve(pairs)[0])
                continue
            p_value = matched_kl(pairs, least_overlap=0.0).estimate.p_value
            (powers if gap else sizes).append(p_value <= LEVEL)
            if not gap:
                former_size.append(pooled_curve(pairs)[1])
    old_p = swap_p_values(np.array(former_size))
    return [
        f"{np.mean(overlaps):.2f}",
        f"{np.mean(refused):.2f}",
        f"{np.mean([one.value for one in covered.estimates]):.3f}",
        covered.covers(0.3),
        rate(sizes),
        rate(powers),
        f"{np.mean([one.value for one in former.estimates]):.3f}",
        former.covers(0.3),
        rate(old_p <= LEVEL),
        rate([_equivalent(one, 0.2) for one in former.estimates]),
    ]


# --- J with betas of unlike spread --------------------------------------------------------------------------

# Name -> SD of J at each of three betas, and the true difference at each.
BETAS = {
    "no difference, equal SDs": ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0)),
    "no difference, SDs 1, 0.5, 0.1": ((1.0, 0.5, 0.1), (0.0, 0.0, 0.0)),
    "+0.8 at two betas, nothing at the third, SDs 1, 1, 0.1": ((1.0, 1.0, 0.1), (0.8, 0.8, 0.0)),
    "+0.8 at two betas, −0.05 at the third, SDs 1, 1, 0.1": ((1.0, 1.0, 0.1), (0.8, 0.8, -0.05)),
    "+0.3 at each, SDs 1, 0.5, 0.1": ((1.0, 0.5, 0.1), (0.3, 0.3, 0.3)),
    "−0.73, −0.52 and 0, SDs 0.3, 0.3, 0.01": ((0.3, 0.3, 0.01), (-0.73, -0.52, 0.0)),
}


def objective(repetitions: int) -> str:
    """The test of J and its interval, compared with weights 1 / SD."""
    rows = []
    for label, (sds, lifts) in BETAS.items():
        found = [_objective_fits(np.random.default_rng([5, i]), sds, lifts) for i in range(repetitions)]
        plain, weighted = (np.array([one[i] for one in found]) for i in (2, 3))
        truth = float(np.mean(lifts))
        ours, theirs = (_Fits([one[i] for one in found], []) for i in (0, 1))
        rows.append(
            [
                label,
                f"{np.mean([one.value for one in ours.estimates]):.3f}",
                ours.covers(truth),
                rate(swap_p_values(plain) <= LEVEL),
                f"{np.mean([one.value for one in theirs.estimates]):.3f}",
                theirs.covers(truth),
                rate(swap_p_values(weighted) <= LEVEL),
                rate([_equivalent(one, 0.1) for one in theirs.estimates]),
            ]
        )
    header = ["truth", "estimate", "coverage", "rejects"]
    header += [f"former: {name}" for name in ("estimate", "coverage", "rejects", "equivalent within 0.1")]
    return (
        "### J with unlike betas, S = 6\n\nThe plain mean over β, beside the former mean with weights "
        "1 / SD. Coverage is of the plain mean of the true differences.\n\n" + markdown(header, rows)
    )


def _objective_fits(
    rng: np.random.Generator, sds: Sequence[float], lifts: Sequence[float]
) -> tuple[Estimate, Estimate, np.ndarray, np.ndarray]:
    index, replicate = np.divmod(np.arange(18), 6)
    reward = np.array(sds)[index, None] * rng.normal(size=(18, 2))
    reward[:, 0] += np.array(lifts)[index]
    pairs = Pairs("a", "b", np.zeros(18), index, replicate, np.arange(18), np.ones((18, 2)), reward)
    contrast = objective_contrast(pairs)
    weights = 1 / np.array([reward[index == beta].std() for beta in range(3)])[index]
    former = stratified_mean(contrast.values, weights, index)
    return mean_of(contrast, pairs), former, contrast.values * contrast.weights, contrast.values * weights


# --- growing a sweep ----------------------------------------------------------------------------------------


def growth(repetitions: int) -> str:
    """False headlines when replicates are added one by one until "better" or "worse"."""
    rng = np.random.default_rng(6)
    differences = rng.normal(size=(repetitions, 12, 3))  # replicate by replicate, three betas each
    stopped = np.zeros(repetitions, dtype=bool)
    for replicates in range(3, 13):
        seen = differences[:, :replicates].reshape(repetitions, -1)
        stopped |= swap_p_values(seen, seed=replicates) <= LEVEL
    rows = [
        ["swap test at each look (what a fixed design would say)", rate(stopped)],
    ]
    return (
        "### Growing a sweep from 3 to 12 replicates, no difference\n\nThree betas; stopped at the first "
        "“better” or “worse”.\n\n" + markdown(["decided by", "false headlines"], rows)
    )
