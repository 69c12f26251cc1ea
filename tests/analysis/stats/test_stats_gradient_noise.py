"""Noise of gradients from a Gram matrix, compared with the gradients."""

import numpy as np
import pytest

from analysis.stats.gradient_noise import NoiseSnapshot, compare_noise
from analysis.stats.verdict import Outcome

NAMES = ("MonteCarlo", "RaoBlackwell")


def gradients(batches=64, scale=0.3, seed=0):
    """Gradients of the reward, and of the objective under both estimators, shape [3, B, 50]."""
    rng = np.random.default_rng(seed)
    reward, mc, rb = rng.normal(size=(3, batches, 50))
    return np.stack([reward, reward + mc, reward + scale * rb])


def snapshot(parts, step=0):
    flat = parts.reshape(-1, parts.shape[-1])
    return NoiseSnapshot(step, flat @ flat.T, NAMES)


def test_noise_and_signal_are_those_of_the_gradients():
    parts = gradients() + 0.2
    found = snapshot(parts)
    terms = {"reward": parts[0], "total": parts[2], "KL": parts[2] - parts[0]}
    for term, rows in terms.items():
        noise = np.trace(np.cov(rows.T))
        assert found.noise(term, "RaoBlackwell") == pytest.approx(noise)
        norms = np.linalg.norm(rows, axis=1)
        assert found.norm_variance(term, "RaoBlackwell") == pytest.approx(norms.var(ddof=1))
        signal = (rows.mean(axis=0) ** 2).sum() - noise / 64
        assert found.signal_to_noise(term, "RaoBlackwell") == pytest.approx(signal / noise)


def test_ratios_are_estimated_at_each_snapshot_for_kl_and_objective():
    found = compare_noise(
        [snapshot(gradients(seed=seed), step) for seed, step in enumerate((0, 5, 9))], NAMES[0]
    )
    assert [(f.snapshot.step, f.term) for f in found] == [
        (step, term) for step in (0, 5, 9) for term in ("KL", "total")
    ]
    kl, total = found[0].verdict, found[1].verdict
    assert np.exp(kl.estimate.value) == pytest.approx(0.09, rel=0.1)
    assert np.exp(total.estimate.value) == pytest.approx(1.09 / 2, rel=0.1)
    assert {f.verdict.outcome for f in found} == {Outcome.BETTER}
    assert kl.sentence.startswith("RaoBlackwell has less variance in the KL’s gradient at step 0 than")
    assert "n\u00a0=\u00a064 batches" in kl.sentence


@pytest.mark.parametrize(
    ("snapshots", "doubt"),
    [
        ([gradients()] * 2, "fewer than 3 snapshots of training"),
        ([gradients(batches=32)] * 3, "fewer than 64 batches"),
        ([gradients() * np.where(np.arange(64) == 5, 30, 1)[None, :, None]] * 3, "heavy tails"),
    ],
)
def test_few_batches_or_a_dominant_one_are_inconclusive(snapshots, doubt):
    for finding in compare_noise([snapshot(parts) for parts in snapshots], NAMES[0]):
        assert finding.verdict.outcome is Outcome.INCONCLUSIVE
        assert doubt in finding.verdict.label
        assert doubt in finding.verdict.sentence


def test_a_single_estimator_has_no_comparison():
    assert compare_noise([snapshot(gradients())], "MonteCarlo") != []
    alone = NoiseSnapshot(0, snapshot(gradients()).gram[:128, :128], NAMES[:1])
    assert compare_noise([alone], "MonteCarlo") == []
