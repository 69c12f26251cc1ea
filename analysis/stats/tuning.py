"""What an arm may lose by the rate that was chosen for it in the tuning stage.

The runs of the grid compare arms at the rates that were chosen for them. At another rate an arm may be
better; what it loses is its regret. The regrets are not known, but the runs of the tuning stage show how
large they may be. Their mean square is added to the variance of a difference between arms, so that its
interval is for the arms at their true best rates. At the smallest or largest rate tried, nothing shows where
the optimum is: there the comparison is one at that rate. `python -m benchmarks certificates` has coverage,
width and power.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from analysis.stats.intervals import Estimate
from analysis.stats.pairs import BoolArray, FloatArray, IntArray

# Level of the intervals of an arm's rates, divided by their number, by which a rate is clearly worse.
_LEVEL = 0.05


@dataclass(frozen=True, eq=False)
class Tuned:
    """What the tuning stage shows about the chosen rate of an arm."""

    rate: float
    edge: str  # "smallest" or "largest" if it is that of those tried, or ""
    left_out: tuple[float, ...]  # rates that are clearly worse than the best one, and no part of the curve
    regrets: FloatArray  # bootstrap samples of what the arm loses by its rate; zeros at an edge

    @property
    def loss(self) -> float:
        """The root mean square of what the arm may lose by its rate."""
        return float(np.sqrt((self.regrets**2).mean()))


def resampled(
    outcomes: FloatArray, log_rates: FloatArray, chosen: int, drawn: IntArray
) -> tuple[BoolArray, FloatArray, FloatArray]:
    """Which rates are on the curve, and samples of the outcome at the best rate, and at the chosen one.

    Each sample resamples replicates, and chooses a rate again. The best outcome is that of a parabola in the
    log rate through the means at the best rate and its two neighbours: an arm's outcome is a parabola only
    near its optimum, as it falls steeply where runs begin to collapse. A rate whose interval lies below that
    of the best one, both simultaneous over the rates, is therefore left out, unless it is one of the best
    three, which a parabola needs. Deviations from the means are
    scaled by sqrt(n / (n - 1)), as those of resampled values are too small.

    Args:
        outcomes: Outcomes of n replicates at R rates, higher being better, shape [n, R]; rates at which a
            value is not finite are left out.
        log_rates: Logarithms of the rates, ascending, shape [R].
        chosen: Index of the chosen rate.
        drawn: Indices of resampled replicates, shape [samples, n].

    Returns:
        Mask of the rates, shape [R], and the two outcomes, shape [samples] each.

    Example:
        >>> same = np.tile([0.0, 1.0, 0.0], (4, 1))                  # without noise, chosen at the top
        >>> resampled(same, np.arange(3.0), 1, np.zeros((2, 4), dtype=int))[1].tolist()
        [1.0, 1.0]
    """
    kept = _kept(outcomes)
    kept[chosen] = True
    at, values, at_chosen = log_rates[kept], outcomes[:, kept], int(kept[:chosen].sum())
    means, count = values.mean(axis=0), len(values)
    sampled = means + (values[drawn].mean(axis=1) - means) * np.sqrt(count / (count - 1))
    return kept, _tops(sampled, at), np.asarray(sampled[:, at_chosen])


def _kept(values: FloatArray) -> BoolArray:
    """Mask of the finite rates that are among the best three, or not clearly worse than the best."""
    finite = np.asarray(np.isfinite(values).all(axis=0))
    means = np.where(finite, values.mean(axis=0), -np.inf)
    level = 1 - _LEVEL / max(1, int(finite.sum()))
    ends = [Estimate.of_mean(column).interval(level) for column in values.T]
    best, third = ends[int(means.argmax())], np.sort(means)[-min(3, len(means))]
    near = [best is None or interval is None or interval.high >= best.low for interval in ends]
    return np.asarray(finite & (np.array(near) | (means >= third)))


def regret_variance(arms: Mapping[str, Tuned], treatment: str, control: str) -> float:
    """The mean square of the difference between the regrets of two arms; 0 without tuning."""
    if treatment not in arms or control not in arms:
        return 0.0
    return float(((arms[treatment].regrets - arms[control].regrets) ** 2).mean())


def _tops(sampled: FloatArray, at: FloatArray) -> FloatArray:
    """The largest value of each sample's parabola near its best rate, for means [samples, R]; [samples]."""
    best = sampled.max(axis=1)
    if len(at) < 3:
        return np.asarray(best)
    middle = np.clip(sampled.argmax(axis=1), 1, len(at) - 2)
    (x0, x1, x2), each = (at[middle + step] for step in (-1, 0, 1)), np.arange(len(sampled))
    y0, y1, y2 = (sampled[each, middle + step] for step in (-1, 0, 1))
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    slope = left + bend * (x1 - x0)  # at x1
    step = np.where(bend < 0, -slope / np.where(bend < 0, 2 * bend, 1.0), 0.0)
    step = np.clip(step, x0 - x1, x2 - x1)
    return np.asarray(np.maximum(best, y1 + slope * step + bend * step**2))
