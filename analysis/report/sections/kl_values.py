"""Spread and bias of estimates of the KL."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, log_scale, looks, sheet
from analysis.results.artifacts import ValueSnapshot, ValueStudy
from analysis.stats.bias import BiasOutcome, BiasVerdict
from analysis.stats.kl_values import REFERENCE, EstimatorSpread, corrected_biases, estimator_spreads
from analysis.stats.text import ends_text, number

# Names of the estimates, as in the documentation.
NAMES = {
    "k1": "Monte Carlo (k1)",
    "k2": "k2",
    "k3": "k3",
    "cv": "control variate, α = 1",
    "cv_fitted": "control variate, fitted α",
    "ht": "Horvitz-Thompson",
    "rb": "Rao-Blackwell",
}
_WORDS = {
    BiasOutcome.EQUIVALENT: "equivalent within {:.0%}",
    BiasOutcome.BIASED: "biased",
    BiasOutcome.INCONCLUSIVE: "inconclusive",
}

Snapshots = dict[int, dict[str, EstimatorSpread]]


def estimation(assessment: Assessment) -> Section | None:
    """Mean, spread and bias of every value estimator, from the artifact of `EstimationStudy`."""
    found = assessment.sweep.study(ValueStudy)
    if found is None:
        return None
    run, artifact = found
    snapshots = corrected_biases({one.step: _spreads(artifact, one) for one in artifact.snapshots})
    labels = {one.step: one.label for one in artifact.snapshots}
    sizes = artifact.group_sizes
    counted = f"{artifact.completions} completions of each of {artifact.prompts} prompts"
    return Section(
        "estimation",
        "Estimating the KL",
        paragraphs=[
            f"All estimates are computed on the same {counted}, sampled from the policy of one run "
            f"({run.cell.title}){_place(artifact)}. Spread is the standard deviation of the estimate from M "
            "completions of a prompt: the square root of the mean variance over prompts. The results apply "
            "to these policies.",
            f"The bias is measured against {_standard(artifact)}; equivalence within "
            f"{artifact.tolerance:.0%} and bias are tested at 5%, corrected over all "
            "estimators and snapshots (Holm), and “inconclusive” does not mean “unbiased”. If the values "
            "are so heavy-tailed that they have no variance (tail index 1/2 or more), the result is "
            "inconclusive: values that dominate their mean may be too rare to occur among them.",
        ],
        figures=[
            _spread_figure(snapshots, labels, sizes),
            *([_noise_figure(snapshots, labels, min(sizes))] if len(snapshots) > 1 else []),
            _prompt_figure(snapshots, labels),
        ],
        tables=[
            *(_table(labels[step], spreads, artifact) for step, spreads in snapshots.items()),
            *_coverage(artifact),
        ],
        numbers={str(step): _numbers(spreads) for step, spreads in snapshots.items()}
        | {
            f"{one.step} reference mass": one.reference_mass.tolist()
            for one in artifact.snapshots
            if one.reference_mass is not None
        },
        exploratory=True,
    )


def _spreads(artifact: ValueStudy, snapshot: ValueSnapshot) -> dict[str, EstimatorSpread]:
    known = None
    if snapshot.standard is not None and snapshot.standard_error is not None:
        known = snapshot.standard, snapshot.standard_error
    return estimator_spreads(
        snapshot.values,
        snapshot.horvitz_thompson,
        artifact.group_sizes,
        tolerance=artifact.tolerance,
        standard=known,
        stratified=artifact.stratum > 1,
    )


def _place(artifact: ValueStudy) -> str:
    """Where the completions are from, and whether they depend on each other."""
    place = " at the given steps" if artifact.snapshots[0].standard is None else ""
    if artifact.stratum > 1:
        place += f"; the {artifact.stratum} completions of an estimate share one random shift (stratified)"
    return place


def _standard(artifact: ValueStudy) -> str:
    """The standard by which a bias is judged, in words."""
    if artifact.snapshots[0].standard is None:
        return f"{NAMES[REFERENCE]}, whose mean is the KL, on the same completions"
    kinds = {one.exact for one in artifact.snapshots}
    words = {True: "the exact KL", False: f"{NAMES[REFERENCE]} on a larger, independent sample"}
    return " or ".join(words[kind] for kind in sorted(kinds, reverse=True))


def _coverage(artifact: ValueStudy) -> list[Table]:
    """The table of the reference's mass that the completions cover, and of times."""
    rows = [
        (
            one.label,
            number(float(one.reference_mass.mean())),
            number(float(one.reference_mass.min())),
            *(number(one.seconds[name], 2) for name in ("sampling", REFERENCE, "rb")),
        )
        for one in artifact.snapshots
        if one.reference_mass is not None and {"sampling", REFERENCE, "rb"} <= one.seconds.keys()
    ]
    if not rows:
        return []
    caption = (
        "Mass of the reference that the completions cover: mean of q(y) / p(y), whose expectation is 1, over "
        "all completions and in the worst prompt. An estimate with a control variate is off by α (mass − 1) "
        "nats, and its standard error does not show it. Seconds: of sampling, of the sampled tokens' "
        "log-probabilities under both models (all estimates but Rao-Blackwell), and of the statistics over "
        "the vocabulary (Rao-Blackwell)."
    )
    return [
        Table(
            caption,
            ("Snapshot", "Mass", "Worst prompt", "Sampling, s", "Sampled tokens, s", "Vocabulary, s"),
            rows,
        )
    ]


def _numbers(spreads: Mapping[str, EstimatorSpread]) -> dict[str, Any]:
    return {
        name: {
            "mean": spread.mean.value,
            "standard_error": spread.mean.standard_error,
            "deviations": {str(size): value for size, value in spread.deviations.items()},
            "log_variance_ratio": spread.log_ratio.value,
            "bias": spread.bias and spread.bias.estimate.value,
            "bias_outcome": spread.bias and spread.bias.outcome.value,
            "bias_tail": spread.bias and spread.bias.tail,
        }
        for name, spread in spreads.items()
    }


def _table(label: str, spreads: Mapping[str, EstimatorSpread], artifact: ValueStudy) -> Table:
    sizes = artifact.group_sizes
    return Table(
        f"{label[:1].upper()}{label[1:]}, in nats per completion. Mean: over prompts, ± its standard error "
        f"(n = {artifact.prompts} "
        f"prompts). Variance: that of the estimate from M = {max(sizes)} relative to {NAMES[REFERENCE]}, "
        "with a 95% jackknife interval over prompts, not corrected for multiple comparisons.",
        (
            "Estimator",
            "Mean",
            *(f"Spread, M = {size}" for size in sizes),
            "Variance",
            "95% CI",
            "Bias",
            "90% CI",
            "Verdict",
        ),
        [
            (
                NAMES.get(name, name),
                f"{number(spread.mean.value)} ± {number(spread.mean.standard_error, 2)}",
                *(number(spread.deviations[size]) for size in sizes),
                *_ratio(name, spread),
                *_bias(spread.bias, artifact.tolerance),
            )
            for name, spread in spreads.items()
        ],
    )


def _ratio(name: str, spread: EstimatorSpread) -> tuple[str, str]:
    interval = spread.log_ratio.interval()
    if name == REFERENCE or interval is None:
        return "1" if name == REFERENCE else "–", "–"
    return number(float(np.exp(spread.log_ratio.value))), ends_text(interval.exp())


def _bias(bias: BiasVerdict | None, tolerance: float) -> tuple[str, str, str]:
    if bias is None:
        return "–", "–", "the reference"
    doubt = f" (heavy tail, index {number(bias.tail, 2)})" if bias.heavy_tailed else ""
    verdict = _WORDS[bias.outcome].format(tolerance) + doubt
    return number(bias.estimate.value, 2), ends_text(bias.interval, 2), verdict


def _spread_figure(snapshots: Snapshots, labels: Mapping[int, str], sizes: list[int]) -> Figure:
    steps, names = list(snapshots), [name for name in NAMES if name in next(iter(snapshots.values()))]
    styles = looks(list(labels.values()), labels[steps[0]])
    with sheet(0.9 + 0.34 * len(names)) as drawn:
        axes = drawn.canvas.subplots()
        for offset, step in zip(np.linspace(-0.15, 0.15, len(steps)), steps, strict=True):
            look = styles[labels[step]]
            axes.plot(
                [snapshots[step][name].deviations[min(sizes)] for name in names],
                np.arange(len(names)) + offset,
                look.marker,
                color=look.colour,
                label=labels[step],
            )
        log_scale(axes.xaxis)
        axes.set_yticks(range(len(names)), [NAMES[name] for name in names])
        axes.invert_yaxis()
        axes.set_xlabel(f"spread of the estimate from {min(sizes)} completion (nats, log scale)")
        drawn.legend(columns=len(steps))
    return Figure(
        drawn.svg,
        "Dot plot of the spread of each estimator of the KL, at each snapshot of training.",
        "Left is better. One mark is one estimator at one snapshot: the square root of the mean variance "
        "over prompts.",
        Table(
            "Spread of the estimate from M completions of a prompt (nats).",
            ("Snapshot", "Estimator", *(f"M = {size}" for size in sizes)),
            [
                (labels[step], NAMES[name], *(number(spreads[name].deviations[size]) for size in sizes))
                for step, spreads in snapshots.items()
                for name in names
            ],
        ),
    )


def _noise_figure(snapshots: Snapshots, labels: Mapping[int, str], size: int) -> Figure:
    """The spread of each estimate against the KL, a point per snapshot."""
    names = [name for name in NAMES if name in next(iter(snapshots.values()))]
    steps = sorted(snapshots, key=lambda step: snapshots[step]["rb"].mean.value)
    kl = [snapshots[step]["rb"].mean.value for step in steps]
    spreads = {name: [snapshots[step][name].deviations[size] for step in steps] for name in names}
    with sheet(3.2) as drawn:
        axes = drawn.canvas.subplots()
        for name, look in looks(names, REFERENCE).items():
            style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.dashes}
            axes.plot(kl, spreads[name], label=NAMES[name], markersize=5, **style)
        log_scale(axes.yaxis)
        axes.set_xlabel(f"KL, {NAMES['rb']} (nats)")
        axes.set_ylabel("spread (nats, log scale)")
        drawn.legend(columns=2)
    return Figure(
        drawn.svg,
        "Line plot of the spread of each estimator of the KL against the KL, with one point per snapshot.",
        "How the noise of the estimates grows with the KL: one point is one estimator at one snapshot. "
        "Below is better.",
        Table(
            f"Spread of the estimate from {size} completion of a prompt (nats), by KL.",
            ("Snapshot", "KL", *(NAMES[name] for name in names)),
            [
                (labels[step], number(value), *(number(spreads[name][place]) for name in names))
                for place, (step, value) in enumerate(zip(steps, kl, strict=True))
            ],
        ),
    )


def _prompt_figure(snapshots: Snapshots, labels: Mapping[int, str]) -> Figure:
    styles = looks(list(labels.values()), labels[next(iter(snapshots))])
    with sheet(3.4, 4.2) as drawn:
        axes = drawn.canvas.subplots()
        for step, spreads in snapshots.items():
            look = styles[labels[step]]
            one, other = spreads[REFERENCE].by_prompt, spreads["rb"].by_prompt
            axes.plot(one, other, look.marker, color=look.colour, markersize=4, label=labels[step])
        limits = [0.0, max(axes.get_xlim()[1], axes.get_ylim()[1])]
        axes.plot(limits, limits, color=INK, linewidth=0.8)
        axes.set_xlim(limits[0], limits[1])
        axes.set_ylim(limits[0], limits[1])
        axes.set_xlabel(f"{NAMES[REFERENCE]} (nats)")
        axes.set_ylabel(f"{NAMES['rb']} (nats)")
        drawn.legend(columns=len(snapshots))
    rows = [
        (labels[step], str(index), number(one), number(other))
        for step, spreads in snapshots.items()
        for index, (one, other) in enumerate(
            zip(spreads[REFERENCE].by_prompt, spreads["rb"].by_prompt, strict=True)
        )
    ]
    return Figure(
        drawn.svg,
        "Scatter plot of the spread of single Rao-Blackwell estimates within each prompt against that of "
        "Monte-Carlo estimates, with the diagonal.",
        "One mark is one prompt at one snapshot. Below the line the Rao-Blackwell estimate varies less "
        "between completions of that prompt, above it more.",
        Table(
            "Standard deviation of single estimates within each prompt (nats).",
            ("Snapshot", "Prompt", NAMES[REFERENCE], NAMES["rb"]),
            rows,
        ),
    )
