"""Training: the rates that were tuned, and the curves of each arm with their intervals."""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from scipy import stats

from analysis.design.rates import at_the_edge, trial_outcomes
from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import Look, legend_lines, log_scale, looks, sheet, thinned, thinning
from analysis.report.matching import tuned_arms
from analysis.results.records import Curve, Run
from analysis.results.sweep import Sweep
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray
from analysis.stats.text import aligned, count, decimals_of, whole_percent
from analysis.stats.tuning import Tuned
from lit_klrb import schema


def tuning(assessment: Assessment) -> Section | None:
    """The outcome against the rate for each arm; None without a tuning stage."""
    sweep = assessment.sweep
    plan = sweep.plan
    if plan.tuning is None or not sweep.trials:
        return None
    sign, name = -1.0 if plan.primary.outcome == schema.KL else 1.0, plan.primary.symbol
    outcomes = {arm: sign * values for arm, values in trial_outcomes(plan, sweep.trials).items()}
    tuned = tuned_arms(sweep)
    runs = count(plan.tuning.replicates, "replicate")
    return Section(
        "tuning",
        "Tuned rates",
        paragraphs=[
            f"Before the grid, every arm ran at each of {len(plan.tuning.rates)} values of {plan.tuning.key} "
            f"with {runs} at each β, with other seeds than those of the grid. Each arm's rate is the one "
            f"with the best mean {name} over β, of those at which no run diverged; plan.json has it.",
            "What an arm loses by its chosen rate, compared with the best rate in the range, is estimated by "
            f"resampling replicates, with a parabola {'of log KL ' if sign < 0 else ''}in the log rate "
            "around the best rate. The mean square of the difference between two arms' losses widens the "
            "interval of their comparison.",
            *(
                f"Clearly worse for {arm}, and not on its curve: "
                f"{', '.join(f'{rate:g}' for rate in one.left_out)}."
                for arm, one in tuned.items()
                if one.left_out
            ),
            *(
                f"{line}. The choice adds no uncertainty to this arm: it is compared at this rate."
                for line in at_the_edge(plan, sweep.locked.rates)
            ),
        ],
        figures=[_tuning_figure(sweep, outcomes, name)],
        tables=[_tuning_table(sweep, outcomes, tuned, name)],
        numbers={
            arm: {
                "chosen": sweep.locked.rates.get(arm),
                "loss": tuned[arm].loss if arm in tuned else None,
                "left_out": list(tuned[arm].left_out) if arm in tuned else [],
                "outcomes": dict(zip(map(str, sorted(plan.tuning.rates)), values.T.tolist(), strict=True)),
            }
            for arm, values in outcomes.items()
        },
    )


def _tuning_table(
    sweep: Sweep, outcomes: Mapping[str, FloatArray], tuned: Mapping[str, Tuned], name: str
) -> Table:
    rates = sorted(sweep.plan.tuning.rates) if sweep.plan.tuning else []
    decimals = decimals_of(float(mean) for values in outcomes.values() for mean in values.mean(axis=0))
    return Table(
        f"Mean {name} over β and replicates at each rate, and the root mean square of what the chosen rate "
        "may lose; “–” where a run is missing or diverged.",
        ("Arm", *(f"{rate:g}" for rate in rates), "Chosen", "May lose"),
        [
            (
                arm,
                *(aligned(float(mean), decimals) for mean in values.mean(axis=0)),
                f"{sweep.locked.rates[arm]:g}" if arm in sweep.locked.rates else "–",
                f"at the {tuned[arm].edge} rate tried"
                if arm in tuned and tuned[arm].edge
                else aligned(tuned[arm].loss if arm in tuned else None, decimals),
            )
            for arm, values in outcomes.items()
        ],
    )


def _tuning_figure(sweep: Sweep, outcomes: Mapping[str, FloatArray], name: str) -> Figure:
    return Figure(
        lambda: _draw_tuning(sweep, outcomes, name),
        f"{name} against the rate, one line per arm, with the chosen rates.",
        f"Mean {name} over β and its 95% t interval over replicates; pale lines are single replicates, "
        "dotted lines the chosen rates.",
    )


def _draw_tuning(sweep: Sweep, outcomes: Mapping[str, FloatArray], name: str) -> str:
    plan = sweep.plan
    rates = np.array(sorted(plan.tuning.rates) if plan.tuning else [])
    styles = looks(plan.grid.arms, plan.primary.control)
    with sheet(2.8) as drawn:
        axes = drawn.canvas.subplots()
        for arm, values in outcomes.items():
            look, means = styles[arm], [Estimate.of_mean(column) for column in values.T]
            axes.plot(rates, values.T, color=look.colour, linewidth=0.5, alpha=0.35)
            axes.plot(rates, [one.value for one in means], linewidth=1.4, **look.line)
            for rate, one in zip(rates, means, strict=True):
                if (interval := one.interval()) is not None and np.isfinite(one.value):
                    axes.plot([rate, rate], interval.ends, color=look.colour, linewidth=1)
            if arm in sweep.locked.rates:
                axes.axvline(sweep.locked.rates[arm], color=look.colour, linestyle=":", linewidth=1)
        log_scale(axes.xaxis)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xlabel("rate (log scale)")
        axes.set_ylabel(name)
        drawn.legend(legend_lines({arm: styles[arm] for arm in outcomes}, lines=True))
    return drawn.svg


METRICS = {schema.REWARD: "mean reward", schema.KL: "KL (nats)"}
SOURCES = {
    "train": "on the prompts of each training step",
    "val": "by the common evaluator, on the same prompts for every run",
}
NAMES = {"train": "Training", "val": "Validation"}
# What carries no signal: shares of each training step, or a number of rows, where a run logs them.
_LOST: dict[str, tuple[str, Callable[[float], str]]] = {
    "equal_rewards": ("Prompts whose completions have equal rewards", whole_percent),
    "unfinished": ("Completions cut at their largest length", whole_percent),
    "left_out": ("Rows of the data left out", "{:.0f}".format),
}
# Most lines of single runs of an arm in a panel, and most points of all of them.
_RUNS, _POINTS = 100, 4_000


def training_curves(assessment: Assessment) -> Section | None:
    """One figure for training and one for validation, with one row per β."""
    drawn = (_figure(assessment, source, where) for source, where in SOURCES.items())
    figures, tables = [figure for figure in drawn if figure is not None], _lost(assessment)
    return Section("curves", "Training curves", figures=figures, tables=tables) if figures or tables else None


def _lost(assessment: Assessment) -> list[Table]:
    """The table of what carries no signal, by arm; none if no run records it."""

    def mean(arm: str, key: str) -> str:
        mine = [run for run in assessment.sweep.grid.values() if run.point.arm == arm]
        curves = [curve.value for run in mine if (curve := _curve(run, "train", key)) is not None]
        values = np.concatenate([np.empty(0), *curves])
        values = values[np.isfinite(values)]
        return _LOST[key][1](float(values.mean())) if len(values) else "–"

    rows = [(arm, *(mean(arm, key) for key in _LOST)) for arm in assessment.sweep.plan.grid.arms]
    caption = (
        "Steps that train nothing, and what is cut: means over the training steps of all runs of an arm."
    )
    any_known = any(text != "–" for _, *texts in rows for text in texts)
    return [Table(caption, ("Arm", *(name for name, _ in _LOST.values())), rows)] if any_known else []


def _figure(assessment: Assessment, source: str, where: str) -> Figure | None:
    grid = assessment.sweep.grid.values()
    curves = [(run, curve) for run in grid for metric in METRICS if (curve := _curve(run, source, metric))]
    if not any(len(curve.step) > 2 for _, curve in curves):  # two points are in the tables of results
        return None
    name, runs = NAMES[source], [*dict.fromkeys(run for run, _ in curves)]
    diverged = (
        " A line that ends early is of a run that diverged." if any(run.diverged for run in runs) else ""
    )
    return Figure(
        lambda: _draw(assessment, runs, source),
        f"{name} curves of reward and KL against the training step for {len(runs)} runs, one row per β.",
        f"{name}: reward and KL {where}. Thick lines are means of an arm over its replicates, at the steps "
        "at which all of them have a value, with pointwise 95% t intervals; pale lines are single runs. "
        f"Curves are not smoothed.{diverged}{thinning(assessment.sweep.plan.grid.replicates, _RUNS)}",
        _table(assessment, runs, source),
    )


def _curve(run: Run, source: str, metric: str) -> Curve | None:
    curve = run.curves.get(f"{source}/{metric}")
    return curve if curve is not None and len(curve.step) else None


def _curves_of(runs: Sequence[Run], source: str, metric: str, index: int, arm: str) -> list[Curve]:
    """The curves of an arm at one beta."""
    mine = (run for run in runs if run.point.beta_index == index and run.point.arm == arm)
    return [curve for run in mine if (curve := _curve(run, source, metric)) is not None]


def _table(assessment: Assessment, runs: Sequence[Run], source: str) -> Table:
    grid, rows = assessment.sweep.plan.grid, []
    control = assessment.sweep.plan.primary.control
    for (index, beta), name, (metric, label) in product(grid.beta.items(), grid.arms, METRICS.items()):
        if curves := _curves_of(runs, source, metric, index, name):
            first, last = np.transpose([curve.value[[0, -1]] for curve in curves])
            sd = float(last.std(ddof=1)) if len(curves) > 1 else None
            means = float(first.mean()), float(last.mean())
            others = _curves_of(runs, source, metric, index, control) if name != control else []
            rows.append((name, f"{beta:g}", label, *means, sd, _steadier(curves, others), str(len(curves))))
    return Table(
        f"{NAMES[source]}: mean over replicates at the first and the last logged step, the standard "
        "deviation (SD) between replicates at the last, and at how many steps it is below the control's.",
        ("Arm", "β", "Metric", "First", "Last", "SD at last", f"Steps with less SD than {control}", "Runs"),
        rows,
    )


def _steadier(curves: Sequence[Curve], others: Sequence[Curve]) -> str:
    """At how many of their common steps some curves vary less than others."""
    if min(len(curves), len(others)) < 2:
        return "–"
    steps = functools.reduce(np.intersect1d, [curve.step for curve in (*curves, *others)])
    spreads = [
        np.std([one.value[np.isin(one.step, steps)] for one in group], axis=0, ddof=1)
        for group in (curves, others)
    ]
    return f"{int(np.less(*spreads).sum())} of {len(steps)}"


def _draw(assessment: Assessment, runs: Sequence[Run], source: str) -> str:
    plan = assessment.sweep.plan
    styles = looks(plan.grid.arms, plan.primary.control)
    with sheet(0.7 + 1.55 * len(plan.grid.beta)) as drawn:
        panels = drawn.canvas.subplots(
            len(plan.grid.beta), len(METRICS), sharex=True, sharey="col", squeeze=False
        )
        for row, (index, beta) in zip(panels, plan.grid.beta.items(), strict=True):
            for axes, (metric, label) in zip(row, METRICS.items(), strict=True):
                axes.set_title(f"β = {beta:g}: {label}", loc="left")
                for name, look in styles.items():
                    curves = _curves_of(runs, source, metric, index, name)
                    _draw_arm(axes, curves, look)
        for axes in panels[-1]:
            axes.set_xlabel("training step")
        drawn.legend(legend_lines(styles, lines=True), columns=2)
    return drawn.svg


def _draw_arm(axes: Axes, curves: Sequence[Curve], look: Look) -> None:
    if not curves:
        return
    shown = thinned(curves, _RUNS)
    points = _POINTS // len(shown)
    # One line with gaps is drawn much faster than a line for each run
    step, value = (
        np.concatenate([np.append(thinned(getattr(one, name), points), np.nan) for one in shown])
        for name in ("step", "value")
    )
    axes.plot(step, value, color=look.colour, linewidth=0.6, alpha=0.3)
    mean, half_width = mean_curve(curves)
    steps, middle, half = (thinned(each, _POINTS) for each in (mean.step, mean.value, half_width.value))
    axes.plot(steps, middle, linewidth=1.5, **look.line)
    if len(curves) > 1:
        axes.fill_between(steps, middle - half, middle + half, color=look.colour, alpha=0.18, linewidth=0)


def mean_curve(curves: Sequence[Curve]) -> tuple[Curve, Curve]:
    """The mean of several curves and half the width of its pointwise 95% t interval.

    Returns:
        Mean and half-width at the steps where every curve has a finite value.
    """
    steps = functools.reduce(np.intersect1d, [curve.step[np.isfinite(curve.value)] for curve in curves])
    values = np.stack([curve.value[np.isin(curve.step, steps)] for curve in curves])
    several, degrees = len(curves) > 1, len(curves) - 1
    half = stats.t.ppf(0.975, degrees) * stats.sem(values) if several else np.zeros(len(steps))
    return Curve(steps, values.mean(axis=0)), Curve(steps, half)
