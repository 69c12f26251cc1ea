"""Spread and bias of estimates of the KL."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.artifacts import ValueSnapshot, ValueStudy
from analysis.stats.kl_values import (
    REFERENCE,
    BiasOutcome,
    BiasVerdict,
    EstimatorSpread,
    estimator_spreads,
    missed_mass,
)
from analysis.stats.text import ends_text, number, percent, whole_percent

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
    BiasOutcome.THEOREM: "unbiased (theorem)",
}


def estimation(assessment: Assessment) -> Section | None:
    """Mean, spread and bias of every value estimator, from the artifact of `EstimationStudy`."""
    studies = assessment.sweep.studies(ValueStudy)
    if not studies:
        return None
    run, artifact = studies[0]
    by_step = {one.step: _spreads(artifact, one) for one in artifact.snapshots}
    where = " at the given steps" if artifact.snapshots[0].standard is None else ""
    counted = f"{artifact.completions} completions of each of {artifact.prompts} prompts"
    return Section(
        "estimation",
        "Estimating the KL",
        paragraphs=[
            f"All estimates are computed on the same {counted}, sampled from the policy of one run "
            f"({run.cell.title}){where}. Spread is the standard deviation of the estimate from M "
            "completions of a prompt: the square root of the mean variance over prompts. The results apply "
            "to these policies.",
            f"The difference is that to {_standard(artifact)}; equivalence within {artifact.tolerance:.0%} "
            "is tested at 5%, with intervals corrected over all estimators and snapshots. All but k2 are "
            "unbiased by a theorem, which no sample overrules: where completions that dominate a mean are "
            "too rare to be drawn, an unbiased estimate misses it, and its standard error does not show it.",
        ],
        tables=[
            *(_table(one, by_step[one.step], artifact) for one in artifact.snapshots),
            *_coverage(artifact),
        ],
        numbers={str(step): _numbers(spreads) for step, spreads in by_step.items()}
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
    estimates = snapshot.values, snapshot.horvitz_thompson, artifact.group_sizes
    count = len(artifact.snapshots)
    return estimator_spreads(*estimates, tolerance=artifact.tolerance, standard=known, snapshots=count)


def _standard(artifact: ValueStudy) -> str:
    """The standard by which a bias is judged, in words."""
    if artifact.snapshots[0].standard is None:
        return f"{NAMES[REFERENCE]}, whose mean is the KL, on the same completions"
    errors = [one.standard_error for one in artifact.snapshots]
    exact = {error is not None and not error.any() for error in errors}
    sample = f"{NAMES[REFERENCE]} on a larger, independent sample"
    return " or ".join(["the exact KL"] * (True in exact) + [sample] * (False in exact))


def _coverage(artifact: ValueStudy) -> list[Table]:
    """The table of the reference's mass that the completions cover, and of times."""
    timed = {"sampling", REFERENCE, "rb"}
    known = [
        (one, one.reference_mass)
        for one in artifact.snapshots
        if one.reference_mass is not None and timed <= one.seconds.keys()
    ]
    caption = (
        "Mass of the reference that the completions cover: mean of q(y) / p(y), whose expectation is 1, over "
        "all completions and in the worst prompt. An estimate with a control variate is off by α (mass − 1) "
        "nats, and its standard error does not show it. Seconds: of sampling, of the sampled tokens' "
        "log-probabilities under both models (all estimates but Rao-Blackwell), and of the statistics over "
        "the vocabulary (Rao-Blackwell)."
    )
    table = Table.of(
        caption,
        known,
        ("Snapshot", lambda row: row[0].label),
        ("Mass", lambda row: float(row[1].mean())),
        ("Worst prompt", lambda row: float(row[1].min())),
        ("Sampling, s", lambda row: row[0].seconds["sampling"]),
        ("Sampled tokens, s", lambda row: row[0].seconds[REFERENCE]),
        ("Vocabulary, s", lambda row: row[0].seconds["rb"]),
    )
    return [table] if known else []


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


def _table(one: ValueSnapshot, spreads: Mapping[str, EstimatorSpread], artifact: ValueStudy) -> Table:
    label, sizes, missed = one.label, artifact.group_sizes, missed_mass(one.values)
    columns = ("Estimator", "Mean", *(f"Spread, M = {size}" for size in sizes))
    rows = []
    for name, spread in spreads.items():
        ratio = ("1" if name == REFERENCE else "–", "–")
        if name != REFERENCE and (interval := spread.log_ratio.interval()) is not None:
            ratio = number(float(np.exp(spread.log_ratio.value))), ends_text(interval.exp())
        mean = f"{number(spread.mean.value)} ± {number(spread.mean.standard_error, 2)}"
        deviations = (number(spread.deviations[size]) for size in sizes)
        rows.append(
            (
                NAMES.get(name, name),
                mean,
                *deviations,
                *ratio,
                *bias_cells(name, spread.bias, artifact.tolerance, missed),
            )
        )
    (level,) = {spread.bias.level for spread in spreads.values() if spread.bias is not None}
    return Table(
        f"{label[:1].upper()}{label[1:]}, in nats per completion. Mean: over prompts, ± its standard error "
        f"(n = {artifact.prompts} prompts). Variance: that of the estimate from M = {max(sizes)} relative to "
        f"{NAMES[REFERENCE]}, with a 95% jackknife interval over prompts, not corrected for multiple "
        "comparisons.",
        (*columns, "Variance", "95% CI", "Difference", f"{percent(level)} CI", "Verdict"),
        rows,
    )


def bias_cells(name: str, bias: BiasVerdict | None, tolerance: float, missed: float) -> tuple[str, str, str]:
    """Difference, interval and verdict of an estimator, with the share of the mass that its sample misses."""
    if bias is None:
        return "–", "–", "the reference"
    verdict = _WORDS[bias.outcome].format(tolerance)
    if bias.outcome is BiasOutcome.THEOREM and name == "cv" and missed > 0:
        verdict += f"; this sample misses {whole_percent(missed)} of the reference's mass"
    elif bias.heavy_tailed:
        verdict += f" (heavy tail, index {number(bias.tail, 2)})"
    return number(bias.estimate.value, 2), ends_text(bias.interval, 2), verdict
