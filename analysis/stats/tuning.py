"""What the choice of rates adds to the uncertainty of a comparison of arms at their best rates.

The runs of the grid compare arms at the rates that were chosen for them. At another rate an arm may be
better; what it loses is its regret. The regrets are not known, but the runs of the tuning stage show how
large they may be. Their mean square is added to the variance of a difference between arms, so that its
interval is for the arms at their true best rates. `python -m benchmarks certificates` has its coverage.
"""

from collections.abc import Mapping

import numpy as np

from analysis.results.rate_choice import trial_outcomes
from analysis.results.sweep import Sweep
from analysis.stats.pairs import FloatArray, IntArray

# Number of bootstrap samples.
SAMPLES = 2_000


def regrets_of(sweep: Sweep) -> dict[str, FloatArray]:
    """Arm -> bootstrap samples of what it loses by its chosen rate; empty without a choice.

    All arms share the resampled replicates, as their runs share seeds.
    """
    if sweep.plan.tuning is None or not sweep.rates:
        return {}
    rates = sorted(sweep.plan.tuning.rates)
    outcomes = trial_outcomes(sweep.plan, sweep.trials)
    count = sweep.plan.tuning.replicates
    drawn = np.random.default_rng(0).integers(count, size=(SAMPLES, count))
    return {
        arm: regrets(outcomes[arm], np.log(rates), rates.index(rate), drawn)
        for arm, rate in sweep.rates.items()
        if rate in rates and np.isfinite(outcomes[arm]).any()
    }


def regrets(outcomes: FloatArray, log_rates: FloatArray, chosen: int, drawn: IntArray) -> FloatArray:
    """Samples of the best outcome at any rate, less that at the chosen one.

    Each sample resamples replicates, and chooses a rate again. The best outcome is that of a parabola in the
    log rate through the means at the best rate and its two neighbours: an arm's outcome is a parabola only
    near its optimum, as it falls steeply where runs begin to collapse. Deviations from the means are scaled
    by sqrt(n / (n - 1)), as those of resampled values are too small.

    Args:
        outcomes: Outcomes of n replicates at R rates, higher being better, shape [n, R]; rates at which a
            value is not finite are left out.
        log_rates: Logarithms of the rates, ascending, shape [R].
        chosen: Index of the chosen rate.
        drawn: Indices of resampled replicates, shape [samples, n].

    Returns:
        Regrets, shape [samples], not negative.

    Example:
        >>> same = np.tile([0.0, 1.0, 0.0], (4, 1))                  # without noise, chosen at the top
        >>> regrets(same, np.arange(3.0), 1, np.zeros((2, 4), dtype=int)).tolist()
        [0.0, 0.0]
    """
    usable = np.asarray(np.isfinite(outcomes).all(axis=0))
    at, values = log_rates[usable], outcomes[:, usable]
    own = int(usable[:chosen].sum())
    means, count = values.mean(axis=0), len(values)
    sampled = means + (values[drawn].mean(axis=1) - means) * np.sqrt(count / (count - 1))
    return np.asarray(np.maximum(0.0, _tops(sampled, at) - sampled[:, own]))


def regret_variance(regrets: Mapping[str, FloatArray], treatment: str, control: str) -> float:
    """The mean square of the difference between the regrets of two arms; 0 without tuning."""
    if treatment not in regrets or control not in regrets:
        return 0.0
    return float(((regrets[treatment] - regrets[control]) ** 2).mean())


def _tops(sampled: FloatArray, at: FloatArray) -> FloatArray:
    """The largest value of each sample's parabola near its best rate, for means [samples, R]; [samples]."""
    best = sampled.max(axis=1)
    if len(at) < 3:
        return np.asarray(best)
    middle = np.clip(sampled.argmax(axis=1), 1, len(at) - 2)
    (x0, x1, x2), rows = (at[middle + step] for step in (-1, 0, 1)), np.arange(len(sampled))
    y0, y1, y2 = (sampled[rows, middle + step] for step in (-1, 0, 1))
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    slope = left + bend * (x1 - x0)  # at x1
    step = np.where(bend < 0, -slope / np.where(bend < 0, 2 * bend, 1.0), 0.0)
    step = np.clip(step, x0 - x1, x2 - x1)
    return np.asarray(np.maximum(best, y1 + slope * step + bend * step**2))
