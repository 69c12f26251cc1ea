"""Fig. 3: hypervolume, and a map of differences in attainment."""

import numpy as np

from analysis.report.assessment import Assessment, corner_of
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import log_scale, sheet
from analysis.stats import Pairs
from analysis.stats.attainment import attainment_on, outside
from analysis.stats.claims import HYPERVOLUME
from analysis.stats.pairs import FloatArray
from analysis.stats.text import number, signed

# Cells of the drawn map in each direction.
_CELLS = 24


def attainment(assessment: Assessment) -> Section | None:
    """Hypervolume per replicate, and the map of differences in attainment."""
    corner = corner_of(assessment.sweep)
    if corner is None or assessment.withheld:
        return None
    found = [(c.pairs, verdict) for c in assessment.comparisons if (verdict := c.of(HYPERVOLUME.key))]
    control = assessment.sweep.plan.primary.control
    return Section(
        "attainment",
        "Hypervolume and attainment",
        paragraphs=[
            "Hypervolume is the area, on log KL and reward, that the runs of one replicate "
            f"dominate up to the worst of any run: KL {number(corner[0])}, reward {number(corner[1])}. "
            "The exact test is valid, but a difference cannot be compared with that of another sweep. Its "
            f"tests are listed under “Differences to {control}”.",
        ],
        figures=[_figure(pairs.treatment, pairs, control) for pairs, _ in found],
        folded=True,
        numbers={
            verdict.treatment: {
                "hypervolume_difference": verdict.estimate.value,
                "p": verdict.test.p_value,
                "p_holm": verdict.adjusted,
                "outcome": verdict.outcome.value,
                "runs_without_volume": outside(pairs, corner),
            }
            for pairs, verdict in found
        },
    )


def _figure(name: str, pairs: Pairs, control: str) -> Figure:
    kept = np.isfinite(pairs.kl) & np.isfinite(pairs.reward)
    kl = np.geomspace(pairs.kl[kept].min(), pairs.kl[kept].max(), _CELLS)
    reward = np.linspace(pairs.reward[kept].min(), pairs.reward[kept].max(), _CELLS)
    difference = attainment_on(pairs, kl, reward)
    ends = {np.unravel_index(place, difference.shape) for place in (difference.argmax(), difference.argmin())}
    return Figure(
        _draw(kl, reward, difference, name, control),
        f"Map over KL and reward of the difference between {name} and {control} in the share of replicates "
        "that attain a point.",
        f"A replicate attains a point if one of its runs has at most that KL and at least that reward. "
        f"Orange with crosses: more replicates of {name} attain the point; blue with lines: more of "
        f"{control}. The map is descriptive.",
        Table.of(
            f"The largest differences between {name} and {control} in the share of replicates that attain a "
            "point.",
            sorted(ends),
            ("KL (nats)", lambda place: number(kl[place[0]])),
            ("Reward", lambda place: number(reward[place[1]])),
            ("Difference", lambda place: signed(float(difference[place]))),
        ),
    )


def _draw(kl: FloatArray, reward: FloatArray, difference: FloatArray, name: str, control: str) -> str:
    levels = np.array([-1.0, -0.75, -0.5, -0.25, -1e-9, 1e-9, 0.25, 0.5, 0.75, 1.0])
    blues = ("#003F66", "#0072B2", "#66AAD1", "#CCE3F0")
    oranges = ("#F7DFCC", "#E69E66", "#D55E00", "#803800")
    colours, hatches = [*blues, "#FFFFFF", *oranges], ["//"] * 4 + [""] + ["xx"] * 4
    with sheet(3.2) as drawn:
        axes = drawn.canvas.subplots()
        filled = axes.contourf(kl, reward, difference.T, levels=levels, colors=colours, hatches=hatches)
        # Pixels take a few kilobytes; hundreds of hatched shapes would take far more
        filled.set_rasterized(True)
        log_scale(axes.xaxis)
        axes.set_xlabel("KL to the reference (nats per completion, log scale)")
        axes.set_ylabel("Mean reward")
        bar = drawn.canvas.colorbar(filled, ticks=[-1, -0.5, 0, 0.5, 1], spacing="proportional")
        bar.set_label(f"{name} − {control}\n(share of replicates)", fontsize=8)
    return drawn.svg
