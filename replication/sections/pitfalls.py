"""Gradients of KL estimates on enumerated models, and where descent along them leads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import Look, legend_lines, looks, sheet
from analysis.results.artifacts import FloatArray
from analysis.stats.intervals import Estimate
from analysis.stats.text import number
from replication import schema
from replication.artifacts import TabularStudy, first_artifact, read_pitfalls

# Relative distances from the exact gradient up to this are rounding, which is below 1e-12.
_ROUNDING = 1e-6


def pitfalls(assessment: Assessment) -> Section | None:
    """Bias, noise and descent of every gradient estimator, from the artifact of `PitfallsStudy`."""
    study = first_artifact(assessment.sweep, schema.PITFALLS, read_pitfalls)
    if study is None:
        return None
    models, runs = len(next(iter(study.gradients.values())).bias), len(study.forward[schema.ANALYTIC])
    return Section(
        "pitfalls",
        "Gradients of KL estimates, exactly",
        paragraphs=[
            f"Computed on models so small that every completion is enumerated. Bias and noise are exact for "
            f"each of {models} random pairs of policy and reference; n counts these pairs. Descent: gradient "
            f"descent without momentum in {runs} runs, each from a pair of its own, on the KL alone and on "
            f"E[reward] − {study.beta:g} KL with random rewards; n counts runs. Sizes depend on these toys; "
            "that a bias is zero or not does not.",
        ],
        figures=[_figure(study)],
        tables=[_gradients(study)],
        numbers=_numbers(study),
        exploratory=True,
    )


def _mean(values: FloatArray) -> Estimate:
    """Over pairs of models or runs, without those that have no cosine (NaN)."""
    return Estimate.of_mean(values[np.isfinite(values)])


def _with_interval(values: FloatArray) -> str:
    estimate = _mean(values)
    interval = estimate.interval()
    if interval is None:
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(interval.low)} to {number(interval.high)})"


def _gradients(study: TabularStudy) -> Table:
    rows = []
    for name, found in study.gradients.items():
        bias = found.bias
        rows.append(
            (
                name,
                "0" if bias.max() < _ROUNDING else _with_interval(bias),
                _with_interval(found.noise),
                _with_interval(found.cosine),
                _with_interval(found.reverse_cosine),
            )
        )
    return Table(
        "Gradient of KL(policy‖reference) from two completions with the leave-one-out baseline: mean over "
        "the pairs of models with a 95% t interval. Bias: distance of the expectation from the exact "
        "gradient; noise: root of the variance; both over the norm of the exact gradient. Cosine: of the "
        "expectation with the exact gradient of KL(policy‖reference) and of KL(reference‖policy); – where "
        "the expectation is zero.",
        ("Estimator", "Bias", "Noise", "Cosine with ∇KL(p‖q)", "Cosine with ∇KL(q‖p)"),
        rows,
    )


def _curves(study: TabularStudy) -> dict[str, Mapping[str, FloatArray]]:
    return {
        "KL(p‖q), descent on the KL": study.forward,
        "KL(q‖p), descent on the KL": study.reverse,
        "KL to the optimum, descent on −J": study.to_optimum,
    }


def _figure(study: TabularStudy) -> Figure:
    rows = [
        (name, *(_with_interval(curves[name][:, -1]) for curves in _curves(study).values()))
        for name in study.forward
    ]
    return Figure(
        lambda: _draw(study),
        "Curves of the KL over steps of gradient descent with the exact gradient and with each estimator's, "
        "unbiased estimators above and biased ones below.",
        "Left: descent on the KL, which should lead to the reference; right: on −J = β KL − E[reward], which "
        "should lead to the optimum. Above: estimators without bias; below: the others; the exact gradient "
        "in both. Mean over runs, logarithmic axis.",
        Table(
            f"After {study.steps[-1]} steps, in nats per completion: mean over runs with a 95% t interval.",
            ("Gradient", *_curves(study)),
            rows,
        ),
    )


def _draw(study: TabularStudy) -> str:
    unbiased = [name for name, found in study.gradients.items() if found.bias.max() < _ROUNDING]
    groups = [unbiased, [name for name in study.gradients if name not in unbiased]]
    groups = [group for group in groups if group]
    curves = {"KL(p‖q)": study.forward, "KL to the optimum": study.to_optimum}
    with sheet(0.6 + 1.9 * len(groups)) as drawn:
        panels = drawn.canvas.subplots(len(groups), len(curves), sharex=True, sharey="col", squeeze=False)
        for row, group in zip(panels, groups, strict=True):
            styles = looks([schema.ANALYTIC, *group], schema.ANALYTIC)
            for axes, (title, found) in zip(row, curves.items(), strict=True):
                _draw_panel(axes, study.steps, found, styles)
                axes.set_title(title, loc="left", fontsize=8)
            handles = legend_lines(styles, lines=True)
            row[-1].legend(handles=handles, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.05))
        for axes in panels[-1]:
            axes.set_xlabel("step", fontsize=8)
    return drawn.svg


def _draw_panel(
    axes: Axes, steps: Sequence[int], curves: Mapping[str, FloatArray], styles: Mapping[str, Look]
) -> None:
    for name, look in styles.items():
        axes.plot(steps, curves[name].mean(0), color=look.colour, linestyle=look.dashes, linewidth=1.2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=7)


def _numbers(study: TabularStudy) -> dict[str, Any]:
    def last(curves: Mapping[str, FloatArray]) -> dict[str, list[float]]:
        ends = {name: _mean(values[:, -1]) for name, values in curves.items()}
        return {name: [end.value, end.standard_error] for name, end in ends.items()}

    return {
        "bias": {name: float(found.bias.mean()) for name, found in study.gradients.items()},
        "noise": {name: float(found.noise.mean()) for name, found in study.gradients.items()},
        "forward": last(study.forward),
        "reverse": last(study.reverse),
        "to_optimum": last(study.to_optimum),
    }
