"""KL values that use several completions, by enumeration of all samples."""

import itertools

import numpy as np
import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import (
    TokenStats,
    clustered_mean,
    cross_fitted_control_variate,
    fit_control_variate,
    horvitz_thompson,
    kl_control_variate,
    kl_values,
    token_stats,
)
from lit_klrb.functional.enumeration import TabularLM, exact_kl


@pytest.fixture(scope="module")
def world():
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(2, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
    policy, reference = (TabularLM(table, max_length=2) for table in tables)
    tokens, mask = policy.sequences()
    logp, logq = (model.logprobs(tokens, mask) for model in (policy, reference))
    return tokens, mask, logp, logp - logq, exact_kl(policy, reference).item()


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_horvitz_thompson_is_unbiased(world, draws):
    tokens, mask, logp, log_ratio, kl = world
    rows = torch.tensor(list(itertools.product(range(len(tokens)), repeat=draws)))
    flat = rows.flatten()
    estimates = horvitz_thompson(log_ratio[flat], logp[flat], tokens[flat], mask[flat], draws)
    probability = logp[rows].sum(1).exp()
    assert (probability @ estimates).item() == pytest.approx(kl, abs=1e-12)


def test_horvitz_thompson_by_its_definition(world):
    tokens, mask, logp, log_ratio, _ = world
    rows = torch.tensor([1, 1, 4, 0, 2, 0])
    estimates = horvitz_thompson(log_ratio[rows], logp[rows], tokens[rows], mask[rows], 3)
    for estimate, distinct in zip(estimates.tolist(), ([1, 4], [0, 2]), strict=True):
        p = logp[distinct].exp().numpy()
        expected = (p / (1 - (1 - p) ** 3) * log_ratio[distinct].numpy()).sum()
        assert estimate == pytest.approx(expected, abs=1e-12)


def test_what_padding_holds_does_not_tell_completions_apart():
    tokens = torch.tensor([[1, 7], [1, 9]])
    mask = torch.tensor([[True, False], [True, False]])
    value = torch.full((2,), 0.3, dtype=torch.float64)
    p = torch.full((2,), 0.5, dtype=torch.float64)
    assert horvitz_thompson(value, p.log(), tokens, mask, 2).item() == pytest.approx(0.5 / 0.75 * 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_completions_too_long_for_a_probability_and_certain_ones_stay_finite(dtype):
    logprobs = torch.tensor([-5000.0, -800.0, 1e-7, 0.0], dtype=dtype)
    tokens = torch.tensor([[1], [2], [3], [3]])
    ratio = torch.tensor([0.4, 0.8, 0.3, 0.3], dtype=dtype)
    estimates = horvitz_thompson(ratio, logprobs, tokens, tokens > 0, 2)
    assert estimates.dtype == dtype
    assert estimates.tolist() == pytest.approx([0.6, 0.3], rel=1e-6)


@pytest.mark.filterwarnings("ignore:one of")
@pytest.mark.parametrize(("prompts", "group_size"), [(4, 1), (2, 2)])
def test_a_cross_fitted_alpha_leaves_the_value_unbiased(world, prompts, group_size):
    _, _, logp, log_ratio, kl = world
    rows = torch.tensor(list(itertools.product(range(len(logp)), repeat=prompts * group_size)))
    probability = logp[rows].sum(1).exp()
    values = torch.stack([cross_fitted_control_variate(log_ratio[row], group_size) for row in rows])
    assert (probability @ values).tolist() == pytest.approx([kl] * (prompts * group_size), abs=1e-12)


@pytest.mark.filterwarnings("ignore:one of")
def test_each_half_of_the_prompts_takes_the_others_alpha(world):
    log_ratio = world[3][torch.tensor([0, 3, 1, 1, 4, 6, 2, 0, 5, 3])]
    even = torch.tensor([True, True, False, False, True, True, False, False, True, True])
    values = cross_fitted_control_variate(log_ratio, group_size=2)
    for half in (even, ~even):
        alpha = fit_control_variate(log_ratio[~half])
        assert torch.equal(values[half], kl_control_variate(log_ratio[half], alpha))


@pytest.mark.filterwarnings("ignore:one of")
def test_all_values_side_by_side(world):
    tokens, mask, _, log_ratio, kl = world
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(2, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
    logits = [TabularLM(table, max_length=2).token_logits(tokens) for table in tables]
    stats = token_stats(*logits, tokens)
    junk = stats.map(lambda field: torch.where(mask, field, torch.nan))
    values = kl_values(junk, mask, tokens, group_size=1, alpha=0.3)
    p = stats.masked(mask).logprobs.sum(-1).exp()
    for name in ("k1", "k3", "cv", "rb"):
        assert (p @ values[name][:, 0]).item() == pytest.approx(kl, abs=1e-12), name
    r = torch.where(mask, stats.logprobs - stats.ref_logprobs, 0)
    expected = {
        "k1": log_ratio,
        "k2": r.square().sum(1) / 2,
        "k3": (r + (-r).exp() - 1).sum(1),
        "cv": log_ratio + 0.3 * ((-log_ratio).exp() - 1),
        "cv_fitted": cross_fitted_control_variate(log_ratio, 1),
        "rb": torch.where(mask, stats.kl, 0).sum(1),
        "ht": log_ratio,  # of one draw
    }
    assert set(values) == set(expected)
    for name, value in expected.items():
        assert torch.allclose(values[name], value[:, None], rtol=0, atol=1e-12), name
    assert "rb" not in kl_values(junk._replace(kl=None), mask, tokens, group_size=1)


def test_values_are_laid_out_by_prompt(world):
    tokens, mask, _, _, _ = world
    rows = torch.tensor([0, 1, 2, 3, 4, 5])
    stats = TokenStats(*torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(1)))
    values = kl_values(stats, mask[rows], tokens[rows], group_size=3)
    assert {name: list(value.shape) for name, value in values.items()} == {
        **{name: [2, 3] for name in ("k1", "k2", "k3", "cv", "cv_fitted")},
        "ht": [2, 1],
    }


def test_the_fitted_alpha_is_minus_the_regression_slope(world):
    log_ratio = world[3]
    covariance = np.cov(log_ratio.numpy(), np.exp(-log_ratio.numpy()))
    expected = -covariance[0, 1] / covariance[1, 1]
    assert fit_control_variate(log_ratio).item() == pytest.approx(expected, abs=1e-12)
    # It has the smallest variance on the completions it was fitted on.
    variances = [
        kl_control_variate(log_ratio, alpha).var().item()
        for alpha in (expected - 0.1, expected, expected + 0.1)
    ]
    assert variances[1] == min(variances)


def test_a_fit_that_rests_on_one_completion_warns():
    with pytest.warns(UserWarning, match=r"one of 4 completions has \d+% of the variance"):
        fit_control_variate(torch.tensor([0.1, 0.2, -9.0, 0.0]))


@pytest.mark.parametrize("value", [0.0, 0.1, -1.7, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fit_without_variation_is_monte_carlo(value, dtype):
    for size in range(2, 12):
        assert fit_control_variate(torch.full((size,), value, dtype=dtype)).item() == 0
    with pytest.raises(ConfigurationError, match="at least 2"):
        fit_control_variate(torch.full((1,), value, dtype=dtype))


def test_the_standard_error_is_that_of_the_prompts_means():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    mean, error = clustered_mean(values)
    per_prompt = values.numpy().mean(1)
    assert mean.item() == pytest.approx(per_prompt.mean())
    assert error.item() == pytest.approx(per_prompt.std(ddof=1) / 7**0.5)
    repeated = clustered_mean(values.repeat(1, 5))
    assert repeated[1].item() == pytest.approx(error.item())
    assert clustered_mean(values[:1])[1].isnan()
