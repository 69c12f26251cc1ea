"""When less noise pays: what the default gains over `MonteCarlo`, each at its own rate, in one figure.

Differences in J = reward - beta KL are shares of what `MonteCarlo` gains over the reference, as tasks have
rewards of their own units.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import offset_copy

from analysis.checks import load_sweep
from analysis.report.figures import Look, legend_lines, looks, sheet
from analysis.report.matching import match, tuned_arms
from analysis.results.records import Run
from analysis.results.sweep import Sweep
from analysis.stats.comparison import Rules, corrected, primary_finding
from analysis.stats.contrast import Contrast, equal_betas, mean_of, objective
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.tuning import regret_variance
from analysis.stats.verdict import Verdict
from lit_klrb import schema

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).parents[1] / "docs" / "pays.svg"
CONTROL = "MonteCarlo"
# What the figure calls real tasks, their published sweeps below `results`, and the arm beside `MonteCarlo`.
TASKS = {
    "SmolLM2, sums": ("smollm2_sums", "combination"),
    "SmolLM2, reviews, prefix rewards": ("smollm2_rates", "prefix"),
}
# The sweeps of the toy, below `results/pays`: one thing changes from the centre. The plan contrasts the last
# with the first.
FACTORS = {
    "room": ("long", "centre", "reference"),
    "kl": ("strong", "centre", "weak"),
    "completions": ("eight", "centre", "two"),
}
# What a factor is called in the figure.
_LABELS = {
    "room": "room left at the start,\nshare of the gain",
    "kl": "final KL of MonteCarlo,\nnats (set by β)",
    "completions": "completions\nper prompt",
}
_TOY = "toy, one thing changed"


@dataclass(frozen=True, eq=False)
class Place:
    """What a sweep found, and where it is on the map.

    Attributes:
        rates: The rates of `MonteCarlo` and of the other arm.
        difference: Mean difference in J between the other arm and `MonteCarlo`, in units of the reward.
        shares: The same for each pair, relative to what `MonteCarlo` gains over the reference; linearised, so
            that their spread has that of the gain.
        share: Their mean. Both intervals include what the chosen rates may lose.
        share_variance: The variance that the choice of rates adds to that of `share`.
        room: What `MonteCarlo` gains over the start, relative to what it gains over the reference.
        kl: Its KL at the end, in nats.
        completions: Completions per prompt.
    """

    rates: tuple[float, float]
    difference: Verdict
    shares: FloatArray
    share: Estimate
    share_variance: float
    room: float
    kl: float
    completions: int

    @classmethod
    def of(cls, sweep: Sweep, treatment: str) -> "Place":
        """The place of a sweep.

        Args:
            sweep: The sweep, with an arm of `MonteCarlo`.
            treatment: The arm that is compared with it.

        Raises:
            ValueError: If an arm is missing, a run diverged, or no run starts at the reference.
        """
        control = _control(sweep)
        pairs = match(sweep, treatment, control)
        if pairs.diverged.any():
            raise ValueError(f"{sweep.plan.name}: a run of the grid diverged, so that its J is unknown")
        ends, weights = objective(pairs), equal_betas(pairs)
        differences, gains = ends[:, 0] - ends[:, 1], ends[:, 1] - reference_reward(sweep)
        gain = float(weights @ gains)
        share = float(weights @ differences) / gain
        shares = share + (differences - share * gains) / gain
        tuned = tuned_arms(sweep)
        variance = regret_variance(tuned, treatment, control)
        return cls(
            (_rate(sweep, control), _rate(sweep, treatment)),
            corrected([primary_finding(pairs, Rules(tuned=tuned))], 0.05)[0],
            shares,
            _mean(shares, pairs).widened(variance / gain**2),
            variance / gain**2,
            float(weights @ (ends[:, 1] - _starts(sweep, pairs))) / gain,
            float(weights @ pairs.kl[:, 1]),
            int(next(iter(sweep.grid.values())).settings["model.completions_per_prompt"]),
        )


def reference_reward(sweep: Sweep) -> float:
    """Reward of the reference: that of the first run that starts from it, such as the warm start.

    Raises:
        ValueError: If there is no such run.
    """
    for run in sweep.runs:
        if run.first(schema.KL) == 0:
            return _first(run, schema.REWARD)
    raise ValueError(f"{sweep.plan.name}: no run starts from the reference, so that its reward is unknown")


def read_toy(results: Path = RESULTS) -> dict[str, Place]:
    """The places of the toy's sweeps, by name."""
    names = dict.fromkeys(name for names in FACTORS.values() for name in names)
    return {name: Place.of(load_sweep(results / "pays" / name), "default") for name in names}


def read_tasks(results: Path = RESULTS) -> dict[str, Place]:
    """The places of the real tasks, by what the figure calls them."""
    return {label: Place.of(load_sweep(results / name), arm) for label, (name, arm) in TASKS.items()}


def contrasts(toy: Mapping[str, Place]) -> dict[str, Estimate]:
    """Factor -> the share at its last level less that at its first, over replicates, which share seeds."""
    found = {}
    for factor, (first, *_, last) in FACTORS.items():
        low, high = toy[first], toy[last]
        mean = Estimate.of_mean(high.shares - low.shares)
        found[factor] = mean.widened(low.share_variance + high.share_variance)
    return found


def table(toy: Mapping[str, Place], tasks: Mapping[str, Place]) -> list[str]:
    """Lines with the numbers of each place, and of the contrasts, whose intervals are simultaneous."""
    lines = []
    for name, place in {**toy, **tasks}.items():
        both = " | ".join(
            _number(estimate, interval)
            for estimate, interval in (
                (place.difference.estimate, place.difference.interval),
                (place.share, place.share.interval()),
            )
        )
        rates = " | ".join(f"{rate:g}" for rate in place.rates)
        where = f"{place.room:.2f} | {place.kl:.2f} | {place.completions}"
        lines.append(f"| {name} | {where} | {rates} | {both} |")
    for factor, found in contrasts(toy).items():
        first, *_, last = FACTORS[factor]
        lines.append(f"- `{last}` − `{first}`: {_number(found, found.interval(1 - 0.05 / len(FACTORS)))}")
    return lines


def draw_pays(toy: Mapping[str, Place], tasks: Mapping[str, Place]) -> str:
    """The share against each factor, with 95 % intervals, as SVG."""
    styles = looks(tasks, _TOY)
    with sheet(3.0) as drawn:
        panels = drawn.canvas.subplots(1, len(FACTORS), sharey=True)
        for axes, (factor, names) in zip(panels, FACTORS.items(), strict=True):
            axes.axhline(0.0, color="black", linewidth=0.8)
            line = [toy[name] for name in names]
            at = [getattr(place, factor) for place in line]
            axes.plot(at, [place.share.value for place in line], color=styles[_TOY].colour, linewidth=0.8)
            for place in line:
                _mark(axes, place, factor, styles[_TOY], 0)
            for number, (label, place) in enumerate(tasks.items(), start=1):
                _mark(axes, place, factor, styles[label], number)
            axes.autoscale_view()
            axes.set_xlabel(_LABELS[factor])
        rooms, kls, completions = panels
        rooms.set_xlim(0, 1.1)
        rooms.set_ylabel("difference in J to MonteCarlo,\nshare of its gain")
        kls.set_xlim(0, 1.15 * max(place.kl for place in (*toy.values(), *tasks.values())))
        completions.set_xscale("log", base=2)
        completions.set_xlim(1.7, 10)
        completions.set_xticks([2, 4, 8], ["2", "4", "8"])
        drawn.legend(legend_lines(styles, lines=False), columns=2)
    return drawn.svg


def _mark(axes: Axes, place: Place, factor: str, look: Look, number: int) -> None:
    """Draw the share of a sweep with its 95 % interval, beside those at the same position."""
    canvas = axes.get_figure()
    assert isinstance(canvas, Figure)
    beside = offset_copy(axes.transData, canvas, x=4.0 * number, units="points")
    at, interval = getattr(place, factor), place.share.interval()
    assert interval is not None
    axes.update_datalim([(at, interval.low), (at, interval.high)])  # which marks beside it do not
    axes.plot([at, at], [interval.low, interval.high], color=look.colour, transform=beside)
    axes.plot(at, place.share.value, look.marker, color=look.colour, markersize=5, transform=beside)


def _number(found: Estimate, interval: Interval | None) -> str:
    """An estimate with its interval."""
    assert interval is not None
    return f"{found.value:+.3f} ({interval.low:.3f} to {interval.high:.3f})".replace("-", "−")


def _rate(sweep: Sweep, arm: str) -> float:
    """The learning rate of an arm, which is the same in all of its runs."""
    (rate,) = {run.settings["model.learning_rate"] for (label, *_), run in sweep.grid.items() if label == arm}
    return float(rate)


def _control(sweep: Sweep) -> str:
    """The label of the arm with `MonteCarlo`."""
    for label, arm in sweep.locked.arms.items():
        if arm.estimator == CONTROL:
            return label
    raise ValueError(f"{sweep.plan.name}: no arm has {CONTROL}")


def _mean(values: FloatArray, pairs: Pairs) -> Estimate:
    """The mean over pairs, or over blocks, as in a report."""
    return mean_of(Contrast(values, equal_betas(pairs), "", ranked=False), pairs)


def _starts(sweep: Sweep, pairs: Pairs) -> FloatArray:
    """J of each pair before the first step, shape [P]."""
    runs = [
        sweep.grid[pairs.control, int(index), int(replicate)]
        for index, replicate in zip(pairs.beta_index, pairs.replicate, strict=True)
    ]
    return np.array([_first(run, schema.REWARD) - run.point.beta * _first(run, schema.KL) for run in runs])


def _first(run: Run, key: str) -> float:
    """A metric before the first step."""
    value = run.first(key)
    if value is None:
        raise ValueError(f"{run.cell}: was not evaluated before its first step")
    return value
