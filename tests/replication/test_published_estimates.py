"""The tables of published estimates have the numbers of their artifacts."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from analysis.results.artifacts import GradientStudy, ValueStudy, read_studies
from analysis.results.store import present, read_json
from analysis.stats.gradient_noise import NoiseSnapshot, compare_gradient_variance
from analysis.stats.intervals import Estimate
from analysis.stats.kl_values import estimator_spreads

RESULTS = Path(__file__).parents[2] / "replication" / "results"
# Prompts of the paper's standard deviations.
PROMPTS = 512
SNAPSHOTS = ("start", "after 50 steps", "after 100 steps")
SIZES = (1, 5, 10)
NAMES = {
    "k1": "`k1` (Monte Carlo)",
    "cv": "control variate, α = 1",
    "cv_fitted": "control variate, fitted α",
    "k3": "`k3`",
    "ht": "Horvitz-Thompson",
    "rb": "Rao-Blackwell",
}
HEADS = {"topk": "16 tokens and the sampled one", "topk_head": "16 tokens alone"}


def studies(directory, names):
    return read_studies({name: read_json(present(RESULTS / directory / f"{name}.json")) for name in names})


def value_rows(study: ValueStudy, labels=SNAPSHOTS, digits=2):
    """Rows of the table of estimates: mean ± standard error, and the SD of an estimate on 512 prompts."""
    for label, one in zip(labels, study.snapshots, strict=True):
        found = estimator_spreads(one.values, one.horvitz_thompson, study.group_sizes)
        for name, title in NAMES.items():
            spread, least = found[name], min(study.group_sizes)
            single = spread.deviations[least] * least**0.5
            deviations = " / ".join(f"{single / (PROMPTS * size) ** 0.5:.{digits}f}" for size in SIZES)
            mean = f"{spread.mean.value:.{digits}f} ± {spread.mean.standard_error:.{digits}f}"
            yield f"| {label} | {title} | {mean} | {deviations} |"


def gradient_rows(study: GradientStudy, labels=SNAPSHOTS):
    """Rows of the table of gradients: variances relative to Monte Carlo's, with 95 % intervals."""
    control, *others = study.estimators
    for label, one in zip(labels, study.snapshots, strict=True):
        snapshot = NoiseSnapshot(one.step, one.gram, study.estimators)
        share = snapshot.noise("KL", control) / snapshot.noise("total", control)
        for name in others:
            cells = []
            for term in ("KL", "total"):
                ratio = compare_gradient_variance(snapshot.between(term, [name, control])).log_ratio
                cells.append(interval(ratio))
            yield f"| {label} | {share:.1%} | `{name}` | {' | '.join(cells)} |"


def whole_rows(study: GradientStudy, label: str):
    """Rows of the table by completions: variances of the whole gradient relative to Monte Carlo's."""
    control, *others = study.estimators
    for one in study.snapshots:
        snapshot = NoiseSnapshot(one.step, one.gram, study.estimators)
        share = snapshot.noise("KL", control) / snapshot.noise("total", control)
        cells = [
            interval(compare_gradient_variance(snapshot.between("total", [name, control])).log_ratio)
            for name in others
        ]
        yield f"| {label} | {one.step} | {share:.1%} | {' | '.join(cells)} |"


def interval(log_ratio: Estimate) -> str:
    found = log_ratio.interval()
    assert found is not None
    return f"{np.exp(log_ratio.value):.3f} ({np.exp(found.low):.3f} to {np.exp(found.high):.3f})"


@pytest.mark.parametrize(("place", "rows"), [(0, value_rows), (1, gradient_rows)])
def test_each_row_of_a_table_is_recomputed_from_the_artifact(place, rows):
    text = (RESULTS / "imdb_estimation" / "README.md").read_text("utf-8")
    expected = list(rows(studies("imdb_estimation", ("estimation", "gradient_noise"))[place]))
    assert len(expected) >= 6
    assert [row for row in expected if row not in text] == []


def far_rows(study: ValueStudy, labels, names=NAMES):
    """Rows of the table far away: with the bias against an independent sample, and the share below 0."""
    for label, one in zip(labels, study.snapshots, strict=True):
        found = estimator_spreads(
            one.values,
            one.horvitz_thompson,
            study.group_sizes,
            tolerance=study.tolerance,
            standard=(one.standard, one.standard_error),
            snapshots=len(study.snapshots),
        )
        for name, title in names.items():
            spread = found[name]
            deviations = " / ".join(f"{spread.deviations[size]:.2f}" for size in SIZES)
            share = f"{deviations} | {spread.deviations[1] / found['k1'].deviations[1]:.0%}"
            below = f"{(one.values[name] < 0).mean():.0%}" if name in one.values else "–"
            low, high = spread.bias.interval.low, spread.bias.interval.high
            bias = f"{spread.bias.estimate.value:.2f} ({low:.2f} to {high:.2f})"
            yield f"| {label} | {title} | {spread.mean.value:.2f} | {bias} | {below} | {share} |"


def assert_printed(folder, place, rows, count, kind="gradient_noise"):
    text = (RESULTS / folder / "README.md").read_text("utf-8")
    (study,) = studies(f"{folder}/{place}", (kind,))
    expected = list(rows(study))
    assert len(expected) == count
    assert [row for row in expected if row not in text] == []


FAR = partial(far_rows, labels=("warm start", "RLOO, rate .002", "RLOO, rate .004"))
NEAR = partial(value_rows, labels=[f"after {step} steps" for step in (3, 6, 12)], digits=4)
END = partial(far_rows, labels=["end of a run"], names=NAMES | HEADS)


@pytest.mark.parametrize(("place", "rows", "count"), [("", NEAR, 18), ("far", FAR, 18), ("end", END, 8)])
def test_the_same_for_smollm2(place, rows, count):
    assert_printed("smollm2_estimation", place, rows, count, "estimation")


@pytest.mark.parametrize("task", ["sums", "words", "reviews"])
def test_the_noise_of_smollm2(task):
    labels = [f"{task}, after {step} steps" for step in (2, 8)]
    assert_printed("smollm2_noise", task, partial(gradient_rows, labels=labels), 16)


BY_COMPLETIONS = {
    f"{task}_{completions}": f"{task}, {completions}"
    for task in ("sums", "words", "reviews")
    for completions in (2, 4, 8)
}
BY_STRIDE = {f"reviews_4_every_{stride}": f"every {stride} tokens" for stride in (4, 8)}


@pytest.mark.parametrize(("name", "label"), (BY_COMPLETIONS | BY_STRIDE).items())
def test_the_noise_of_smollm2_at_three_points(name, label):
    assert_printed("smollm2_noise", name, partial(whole_rows, label=label), 3)
