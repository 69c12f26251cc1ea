"""Fig. 5: the variance of gradients under each estimator relative to the control, at several snapshots."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import NullFormatter

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, legend_lines, looks, sheet
from analysis.results.artifacts import GradientSnapshot, GradientStudy
from analysis.stats.gradient_noise import (
    TERMS,
    NoiseFinding,
    NoiseSnapshot,
    compare_layers,
    compare_noise,
)
from analysis.stats.text import number, ratio_text


def gradient_noise(assessment: Assessment) -> Section | None:
    """Variance ratios with verdicts, from the artifact of `GradientNoiseStudy`."""
    found = assessment.sweep.study(GradientStudy)
    if found is None:
        return None
    run, artifact = found
    names, plan = artifact.estimators, assessment.sweep.plan
    control = plan.primary.control if plan.primary.control in names else names[0]
    snapshots = [NoiseSnapshot(one.step, one.gram, names) for one in artifact.snapshots]
    findings = compare_noise(snapshots, control, plan.primary.alpha)
    pooled = artifact.prompts * artifact.snapshots[0].completions
    return Section(
        "gradient_noise",
        "Noise of the gradients",
        paragraphs=[
            f"tr Cov of the gradient of a batch of {artifact.prompts} prompts with {pooled} completions, "
            f"over {artifact.batches} batches of different prompts and completions, the same for all "
            f"estimators. {_policies(artifact, run.cell.title)}, β = {artifact.snapshots[0].beta:g}. The "
            "gradient of the KL is the whole gradient minus that of the reward. Training uses the whole "
            "gradient; its variance ratio differs from that of the KL alone.",
        ],
        notes=[finding.verdict.sentence for finding in findings if finding.term == "total"],
        figures=[_figure(findings, names, control)] if findings else (),
        tables=[_absolute(snapshots)],
        details=[_by_layer(one, names, control) for one in artifact.snapshots if one.layers],
        numbers={"findings": [_numbers(finding) for finding in findings]} | _layer_numbers(artifact, control),
        exploratory=True,
    )


def _policies(artifact: GradientStudy, title: str) -> str:
    """Which policies the gradients are of."""
    if not any(one.layers for one in artifact.snapshots):
        return f"The policy is that of one run ({title}) at the given steps"
    listed = "; ".join(f"{one.step}: {one.label}" for one in artifact.snapshots)
    return f"The policies are those of checkpoints, numbered as steps ({listed})"


def _layer_numbers(artifact: GradientStudy, control: str) -> dict[str, Any]:
    layers = {
        one.label: {
            f"{found.layer} {found.term} {found.estimator}": [found.ratio, found.p, found.p_holm]
            for found in compare_layers(one.layers, artifact.estimators, control)
        }
        for one in artifact.snapshots
        if one.layers
    }
    return {"layers": layers} if layers else {}


def _by_layer(snapshot: GradientSnapshot, names: Sequence[str], control: str) -> Table:
    return Table(
        f"{snapshot.label}: variance of each layer's gradient relative to {control}, from disjoint pairs of "
        "batches. p: exact sign flips, with Holm's correction over this table.",
        ("Layer", "Gradient of", "Estimator", "Ratio", "p (Holm)"),
        [
            (found.layer, found.term, found.estimator, number(found.ratio), number(found.p_holm, 2))
            for found in compare_layers(snapshot.layers, names, control)
        ],
    )


def _numbers(finding: NoiseFinding) -> dict[str, Any]:
    verdict, variance = finding.verdict, finding.variance
    interval = verdict.interval
    return {
        "step": finding.snapshot.step,
        "term": finding.term,
        "estimator": verdict.treatment,
        "log_ratio": verdict.estimate.value,
        "interval": None if interval is None else [interval.low, interval.high],
        "p_pairs": variance.exact_test.p_value,
        "p_centred": variance.test.p_value,
        "p_holm": verdict.adjusted,
        "outcome": verdict.outcome.value,
        "top_share": list(variance.top_share),
    }


def _absolute(snapshots: Sequence[NoiseSnapshot]) -> Table:
    rows = []
    for snapshot in snapshots:
        cells = [("reward", snapshot.estimators[0], "any")]
        cells += [(term, name, name) for term in TERMS for name in snapshot.estimators]
        for term, name, shown in cells:
            noise, ratio = snapshot.noise(term, name), snapshot.signal_to_noise(term, name)
            rows.append((str(snapshot.step), term, shown, number(noise), number(ratio, 2)))
    return Table(
        "Noise: tr Cov of the gradient of one batch. Signal to noise: an unbiased estimate of the mean "
        "gradient's squared norm, which may be negative, divided by the noise. Below 1, the gradient of one "
        "batch is mostly noise.",
        ("Step", "Gradient of", "Estimator", "Noise", "Signal to noise"),
        rows,
    )


def _figure(findings: Sequence[NoiseFinding], names: Sequence[str], control: str) -> Figure:
    return Figure(
        _draw(findings, names, control),
        f"Forest plot of the gradient's variance under each estimator relative to {control}, for the KL and "
        "the whole objective at each snapshot of training.",
        f"Left of 1 an estimator has less noise than {control}. Bars are 95% jackknife-t intervals over "
        "batches (n counts batches), for one comparison at a time.",
        Table(
            f"Variance relative to {control}. p (pairs): exact sign flips of disjoint pairs of batches, on "
            "which the verdict is based after Holm's correction over this table. p (centred): sign flips of "
            "distances to the mean, more powerful, but too small if tails differ. Kurtosis and largest share "
            "of one batch: estimator / control.",
            (
                "Step",
                "Gradient of",
                "Estimator",
                "Ratio",
                "95% CI",
                "p (pairs)",
                "p (Holm)",
                "p (centred)",
                "Kurtosis",
                "Largest share",
                "Verdict",
            ),
            [_row(finding) for finding in findings],
        ),
    )


def _row(finding: NoiseFinding) -> tuple[str, ...]:
    verdict, variance = finding.verdict, finding.variance
    return (
        str(finding.snapshot.step),
        finding.term,
        verdict.treatment,
        number(float(np.exp(verdict.estimate.value))),
        ratio_text(verdict.interval).partition(" CI ")[2] or "–",
        number(verdict.test.p_value, 2),
        number(verdict.adjusted, 2),
        number(variance.test.p_value, 2),
        " / ".join(number(value, 2) for value in variance.kurtosis),
        " / ".join(f"{share:.0%}" for share in variance.top_share),
        verdict.label,
    )


def _draw(findings: Sequence[NoiseFinding], names: Sequence[str], control: str) -> str:
    styles = looks(names, control)
    places = list(dict.fromkeys((finding.term, finding.snapshot.step) for finding in findings))
    shown = [name for name in names if name != control]
    spread = dict(zip(shown, np.linspace(-0.2, 0.2, len(shown)) if len(shown) > 1 else [0.0], strict=True))
    with sheet(1.0 + 0.36 * len(places)) as drawn:
        axes = drawn.canvas.subplots()
        for finding in findings:
            verdict = finding.verdict
            row = places.index((finding.term, finding.snapshot.step)) + spread[verdict.treatment]
            look = styles[verdict.treatment]
            if verdict.interval is not None:
                ends = np.exp([verdict.interval.low, verdict.interval.high])
                axes.plot(ends, [row, row], color=look.colour, linewidth=1.6)
            axes.plot([np.exp(verdict.estimate.value)], [row], look.marker, color=look.colour, markersize=6)
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(places)), [f"{term}, step {step}" for term, step in places])
        axes.invert_yaxis()
        axes.set_xlabel(f"variance relative to {control} (log scale)")
        handles = legend_lines({name: styles[name] for name in shown}, lines=False)
        drawn.canvas.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=8)
    return drawn.svg
