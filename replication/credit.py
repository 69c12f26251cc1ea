"""The map of what a token is credited with in distillation: every study in one figure, from near to far."""

from pathlib import Path

import numpy as np

from analysis.report.figures import legend_lines, looks, sheet
from analysis.results.load import load_sweep
from analysis.results.sweep import Sweep
from analysis.stats.intervals import Estimate

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).parents[1] / "docs" / "credit.svg"
# Published sweeps and what they are, from the student that can match its teacher to the one that cannot.
STUDIES = {
    "distillation_full": "toy, can match",
    "smollm2_heal": "SmolLM2 without two layers,\neach arm at its own rate",
    "smollm2_credit": "SmolLM2, two contexts,\neach arm at its own rate",
    "smollm2_json": "SmolLM2, one context,\none rate",
    "imdb_distill": "reviews, smaller student",
    "distillation_limited": "toy, cannot match:\nanswers end at once",
}
PRACTICE = "own-sampled"
# Arms and what a token is credited with.
CREDITS = {
    "own-exact": "its own KL, exact",
    "discount-annealed": "discount 0 to 1 (default)",
    "future-exact": "all later KLs, exact own",
    "future-sampled": "all later log ratios, sampled",
    "minillm": "MiniLLM's",
}


def log_ratio(sweep: Sweep, arm: str) -> Estimate:
    """Mean difference of the log of the final KL between an arm and practice, over matched replicates."""
    kls = [
        [sweep.grid[name, 0, replicate].outcome("kl") for replicate in range(sweep.plan.grid.replicates)]
        for name in (arm, PRACTICE)
    ]
    return Estimate.of_mean(np.subtract(*np.log(kls)))


def draw_map(results: Path = RESULTS) -> str:
    """The final KL of each credit relative to practice, with 95 % intervals, as SVG."""
    styles = looks(CREDITS.values(), PRACTICE)
    with sheet(3.9) as drawn:
        axes = drawn.canvas.subplots()
        axes.axvline(1.0, color="black", linewidth=0.8)
        for row, name in enumerate(STUDIES):
            sweep = load_sweep(results / name)
            for place, (arm, label) in enumerate(CREDITS.items()):
                if arm not in sweep.plan.grid.arms:
                    continue
                found, look = log_ratio(sweep, arm), styles[label]
                interval = found.interval()
                assert interval is not None
                height = row + 0.17 * (place - (len(CREDITS) - 1) / 2)
                axes.plot(np.exp([interval.low, interval.high]), [height] * 2, color=look.colour)
                axes.plot(np.exp(found.value), height, look.marker, color=look.colour)
        axes.set_xscale("log")
        axes.set_xticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
        axes.minorticks_off()
        axes.set_xlabel("final KL relative to sampled own-token credit")
        axes.set_yticks(range(len(STUDIES)), STUDIES.values())
        axes.invert_yaxis()
        entries = legend_lines({label: styles[label] for label in CREDITS.values()}, lines=False)
        drawn.canvas.legend(handles=entries, loc="outside upper center", ncols=2)
    return drawn.svg
