"""The map of what a token is credited with in distillation: every study in one figure, from near to far."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from analysis.checks import load_sweep
from analysis.report.figures import legend_lines, looks, sheet
from analysis.results.sweep import Sweep
from analysis.stats.intervals import Estimate

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).parents[1] / "docs" / "credit.svg"
# Published sweeps and what they are, from the student that can match its teacher to the one that cannot.
STUDIES = {
    "distillation_full": "toy, can match",
    "smollm2_heal": "SmolLM2 without two layers,\neach arm at its own rate",
    "smollm2_heal_forward": "the same, one rate",
    "smollm2_credit": "SmolLM2, two contexts,\neach arm at its own rate",
    "smollm2_directions": "the same, other arms",
    "smollm2_forward": "the same, one rate",
    "smollm2_future": "the same, another rate",
    "smollm2_contexts": "SmolLM2, two other contexts,\neach arm at its own rate",
    "smollm2_json": "SmolLM2, one context,\none rate",
    "imdb_distill": "reviews, smaller student",
    "distillation_limited": "toy, cannot match:\nanswers end at once",
}
CONTROL = "own-exact"
# Arms and what a token is credited with.
CREDITS = {
    "own-sampled": "its own log ratio, sampled (practice)",
    "discount-annealed": "discount 0 to 1 (default)",
    "future-exact": "all later KLs, exact own",
    "future-sampled": "all later log ratios, sampled",
    "minillm": "MiniLLM's",
    "forward": "its own forward KL, exact",
}


def log_ratio(sweep: Sweep, arm: str) -> Estimate:
    """Mean difference of the log of the final KL between an arm and the control, over matched replicates."""
    kls = [
        [sweep.grid[name, 0, replicate].outcome("kl") for replicate in range(sweep.plan.grid.replicates)]
        for name in (arm, CONTROL)
    ]
    return Estimate.of_mean(np.subtract(*np.log(kls)))


def relative_seconds(sweep: Sweep, arm: str) -> float | None:
    """Median over matched replicates of a run's time relative to the control's; None if times are unknown."""
    ratios = []
    for replicate in range(sweep.plan.grid.replicates):
        times = [sweep.seconds.get(sweep.grid[name, 0, replicate].cell.id) for name in (arm, CONTROL)]
        if times[0] is not None and times[1] is not None:
            ratios.append(times[0] / times[1])
    return float(np.median(ratios)) if ratios else None


def _span(sweep: Sweep, arms: Iterable[str]) -> str:
    """The least and the largest of the arms' relative seconds; empty if they are unknown."""
    found = [ratio for arm in arms if (ratio := relative_seconds(sweep, arm)) is not None]
    return f"{min(found):.2f} to {max(found):.2f}" if found else ""


def draw_map(results: Path = RESULTS) -> str:
    """The final KL of each credit relative to exact own-token credit, with 95 % intervals, as SVG.

    At the right is the least and the largest of the arms' relative seconds.
    """
    styles = looks(CREDITS.values(), CONTROL)
    seconds = []
    with sheet(5.2) as drawn:
        axes = drawn.canvas.subplots()
        axes.axvline(1.0, color="black", linewidth=0.8)
        for row, name in enumerate(STUDIES):
            sweep = load_sweep(results / name)
            arms = [arm for arm in CREDITS if arm in sweep.plan.grid.arms]
            seconds.append(_span(sweep, arms))
            for place, arm in enumerate(arms):
                found, look = log_ratio(sweep, arm), styles[CREDITS[arm]]
                interval = found.interval()
                assert interval is not None
                height = row + 0.15 * (place - (len(arms) - 1) / 2)
                axes.plot(np.exp([interval.low, interval.high]), [height] * 2, color=look.colour)
                axes.plot(np.exp(found.value), height, look.marker, color=look.colour)
        axes.set_xscale("log")
        axes.set_xticks([0.2, 0.5, 1, 2, 5, 10, 20], ["0.2", "0.5", "1", "2", "5", "10", "20"])
        axes.minorticks_off()
        axes.set_xlabel("final KL relative to exact own-token credit")
        axes.set_yticks(range(len(STUDIES)), STUDIES.values())
        axes.invert_yaxis()
        beside = axes.secondary_yaxis("right")
        beside.set_yticks(range(len(STUDIES)), seconds)
        beside.tick_params(length=0)
        beside.set_ylabel("seconds of a run, relative")
        entries = legend_lines({label: styles[label] for label in CREDITS.values()}, lines=False)
        drawn.canvas.legend(handles=entries, loc="outside upper center", ncols=2)
    return drawn.svg
