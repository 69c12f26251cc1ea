"""Fig. 5: the variance of gradients under each estimator relative to the control, at several snapshots."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, legend_lines, log_scale, looks, sheet
from analysis.results.artifacts import GradientStudy
from analysis.results.plan import Primary
from analysis.stats.gradient_noise import TERMS, NoiseFinding, NoiseSnapshot, compare_noise
from analysis.stats.text import number, whole_percent


def gradient_noise(assessment: Assessment) -> Section | None:
    """Variance ratios with verdicts, from the artifacts of `GradientNoiseStudy`."""
    sweep = assessment.sweep
    studies = sorted(sweep.studies(GradientStudy), key=lambda study: study[1].snapshots[0].beta)
    measured = [_Measured(artifact, run.cell.title, sweep.plan.primary) for run, artifact in studies]
    if not measured:
        return None
    return Section(
        "gradient_noise",
        "Noise of the gradients",
        paragraphs=[
            *(_description(one) for one in measured),
            "The gradient of the KL is the whole gradient minus that of the reward. Training uses the whole "
            "gradient; its variance ratio differs from that of the KL alone.",
        ],
        figures=[_figure(one) for one in measured if one.findings],
        tables=[_absolute(one) for one in measured],
        numbers={
            "findings": [_numbers(one, finding) for one in measured for finding in one.findings],
            "absolute": [row for one in measured for row in _absolute_numbers(one)],
        },
        exploratory=True,
    )


class _Measured:
    """One artifact, compared with the control.

    Attributes:
        names: The estimators.
        control: The one with which the others are compared.
        findings: The comparisons.
        prefix: What distinguishes its tables and figures from those of other artifacts.
    """

    def __init__(self, artifact: GradientStudy, title: str, primary: Primary) -> None:
        self.artifact, self.title, self.names = artifact, title, artifact.estimators
        self.beta = artifact.snapshots[0].beta
        self.prefix = f"β = {self.beta:g}. "
        self.control = primary.control if primary.control in self.names else self.names[0]
        self.snapshots = [NoiseSnapshot(one.step, one.gram, self.names) for one in artifact.snapshots]
        self.findings = compare_noise(self.snapshots, self.control, primary.alpha)


def _description(measured: _Measured) -> str:
    """What the gradients are of: batches, and the policies of one run."""
    artifact = measured.artifact
    pooled = artifact.prompts * artifact.snapshots[0].completions
    return (
        f"{measured.prefix}Variance of the gradient (trace of its covariance) over {artifact.batches} "
        f"batches of {artifact.prompts} prompts and {pooled} completions; all estimators see the same "
        f"batches. The policy is that of one run ({measured.title}) at the given steps."
    )


def _numbers(measured: _Measured, finding: NoiseFinding) -> dict[str, Any]:
    verdict, variance = finding.verdict, finding.variance
    return {
        "beta": measured.beta,
        "step": finding.snapshot.step,
        "term": finding.term,
        "estimator": verdict.treatment,
        "log_ratio": verdict.estimate.value,
        "interval": verdict.interval and verdict.interval.ends,
        "p_pairs": verdict.test.p_value,
        "p_adjusted": verdict.adjusted,
        "outcome": verdict.outcome.value,
        "top_share": list(variance.top_share),
    }


def _absolute_numbers(measured: _Measured) -> Iterator[dict[str, Any]]:
    for snapshot in measured.snapshots:
        places = [("reward", snapshot.estimators[0], "any")]
        places += [(term, name, name) for term in TERMS for name in snapshot.estimators]
        for term, name, shown in places:
            yield {
                "beta": measured.beta,
                "step": snapshot.step,
                "term": term,
                "estimator": shown,
                "noise": snapshot.noise(term, name),
                "norm_variance": snapshot.norm_variance(term, name),
                "signal_to_noise": snapshot.signal_to_noise(term, name),
            }


def _absolute(measured: _Measured) -> Table:
    return Table.of(
        f"{measured.prefix}Noise: variance of one batch's gradient (trace of the covariance). Variance of "
        "the norm: that of the gradient's length alone. Signal to noise: squared norm of the mean gradient "
        "(unbiased, so it may be negative) over the noise; below 1 a batch's gradient is mostly noise.",
        _absolute_numbers(measured),
        ("Step", lambda row: str(row["step"])),
        ("Gradient of", lambda row: str(row["term"])),
        ("Estimator", lambda row: str(row["estimator"])),
        ("Noise", lambda row: number(row["noise"])),
        ("Variance of the norm", lambda row: number(row["norm_variance"])),
        ("Signal to noise", lambda row: number(row["signal_to_noise"], 2)),
    )


def _figure(measured: _Measured) -> Figure:
    findings, control = measured.findings, measured.control
    return Figure(
        lambda: _draw(findings, measured.names, control),
        f"Forest plot of the gradient's variance under each estimator relative to {control}, for the KL and "
        f"the whole objective at each snapshot of training, β = {measured.beta:g}.",
        f"{measured.prefix}Left of 1 an estimator has less noise than {control}. Bars are the ratios "
        "that exact sign flips of disjoint pairs of batches do not reject (n counts batches), simultaneous "
        "over the table.",
        Table.of(
            f"{measured.prefix}Variance relative to {control}. p: exact sign flips of disjoint pairs of "
            "batches, corrected over this table. Largest share of one batch: estimator / control.",
            findings,
            ("Step", lambda finding: str(finding.snapshot.step)),
            ("Gradient of", lambda finding: finding.term),
            ("Estimator", lambda finding: finding.verdict.treatment),
            ("Ratio", lambda finding: float(np.exp(finding.verdict.estimate.value))),
            ("Interval", lambda finding: finding.verdict.interval and finding.verdict.interval.exp()),
            ("p", lambda finding: number(finding.verdict.test.p_value, 2)),
            ("p (corrected)", lambda finding: number(finding.verdict.adjusted, 2)),
            ("Largest share", lambda finding: " / ".join(map(whole_percent, finding.variance.top_share))),
            ("Verdict", lambda finding: finding.verdict.label),
        ),
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
                axes.plot(verdict.interval.exp().ends, [row, row], color=look.colour, linewidth=1.6)
            axes.plot([np.exp(verdict.estimate.value)], [row], look.marker, color=look.colour, markersize=6)
        axes.axvline(1, color=INK, linewidth=0.8)
        log_scale(axes.xaxis)
        axes.set_yticks(range(len(places)), [f"{term}, step {step}" for term, step in places])
        axes.invert_yaxis()
        axes.set_xlabel(f"variance relative to {control} (log scale)")
        drawn.legend(legend_lines({name: styles[name] for name in shown}, lines=False), columns=2)
    return drawn.svg
