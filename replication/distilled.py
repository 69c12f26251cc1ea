"""Distillation: each arm at its own best rate, compared with a control over the map of problems."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.results.artifacts import FloatArray
from analysis.stats.comparison import one_step
from analysis.stats.intervals import Estimate, Interval
from replication import schema
from replication.artifacts import DistillationArtifact


@dataclass(frozen=True, eq=False)
class DistilledArm:
    """An arm at a point of the map, at the rate that was best on the selection runs.

    Attributes:
        rate: That rate.
        at_edge: Whether it is the smallest or largest rate tried, so that a better one may lie outside.
        kl: Final KL of the evaluation runs, shape [runs].
        log_ratio: Mean over runs of the log of its KL over the control's.
        p: Two-sided p of a paired t-test of that mean; NaN for the control.
        p_adjusted: The same corrected for all arms and points of the map.
        level: .05 over their number, the level of an interval that agrees with it.
    """

    rate: float
    at_edge: bool
    kl: FloatArray
    log_ratio: Estimate
    p: float
    p_adjusted: float
    level: float

    @property
    def mean(self) -> Estimate:
        """Mean KL over runs."""
        return Estimate.of_mean(self.kl)

    @property
    def interval(self) -> Interval | None:
        """The interval of the log ratio, simultaneous over all arms and points of the map."""
        return self.log_ratio.interval(1 - self.level)


def distilled_arms(artifact: DistillationArtifact, control: str) -> dict[str, list[DistilledArm]]:
    """All arms by label, one entry per point of the map.

    Args:
        artifact: The study.
        control: The arm with which the others are compared.
    """
    chosen = {arm: _at_best_rate(artifact, values) for arm, values in artifact.finals.items()}
    tests: dict[tuple[str, int], float] = {}
    ratios: dict[tuple[str, int], Estimate] = {}
    for arm, (_, finals) in chosen.items():
        for cell, kl in enumerate(finals):
            difference = np.log(np.maximum(kl, _LEAST)) - np.log(np.maximum(chosen[control][1][cell], _LEAST))
            ratios[arm, cell] = Estimate.of_mean(difference)
            if arm not in (control, schema.ANALYTIC):
                tests[arm, cell] = _paired_p(difference)
    adjusted = dict(zip(tests, one_step(list(tests.values())), strict=True))
    rates = np.array(artifact.learning_rates)
    return {
        arm: [
            DistilledArm(
                float(rates[best[cell]]),
                len(rates) > 1 and int(best[cell]) in (0, len(rates) - 1),
                finals[cell],
                ratios[arm, cell],
                tests.get((arm, cell), float("nan")),
                float(adjusted.get((arm, cell), float("nan"))),
                0.05 / max(1, len(tests)),
            )
            for cell in range(len(artifact.cells))
        ]
        for arm, (best, finals) in chosen.items()
    }


def _paired_p(differences: FloatArray) -> float:
    return float(stats.ttest_1samp(differences, 0.0).pvalue) if differences.any() else 1.0


# A KL below this is rounding.
_LEAST = 1e-9


def _at_best_rate(artifact: DistillationArtifact, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Index of the rate with the smallest mean log KL on the selection runs, and the KLs of the others."""
    logs = np.log(np.maximum(values, _LEAST))
    best = logs[:, :, : artifact.selection].mean(axis=2).argmin(axis=1)
    return best, values[np.arange(len(values)), best, artifact.selection :]


def regret(arms: Mapping[str, list[DistilledArm]]) -> dict[str, float]:
    """Largest ratio, over the map, of an arm's geometric mean KL to that of the best arm at that point.

    1 is the best arm everywhere; descent along the exact gradient is left out.

    Args:
        arms: Results of `distilled_arms`.
    """
    logs = {
        arm: np.array([np.log(np.maximum(one.kl, _LEAST)).mean() for one in found])
        for arm, found in arms.items()
        if arm != schema.ANALYTIC
    }
    least = np.min(list(logs.values()), axis=0)
    return {arm: float(np.exp((values - least).max())) for arm, values in logs.items()}
