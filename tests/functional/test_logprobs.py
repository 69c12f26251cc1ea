"""Token statistics, compared with float64, also for extreme values."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import K3LossSequence, MonteCarlo, RaoBlackwell, ReleasedRaoBlackwell
from lit_klrb.functional import TokenStats, token_stats


def random(*shape, seed=0, spread=2.0, dtype=torch.float32):
    return (spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def plain(logits, ref_logits, tokens, temperature=1.0):
    p, q = (log_softmax(x.double().numpy() / temperature, axis=-1) for x in (logits, ref_logits))
    index = tokens.numpy()[..., None]
    kl = (np.exp(p) * (p - q)).sum(-1)
    by_token = [np.take_along_axis(x, index, -1)[..., 0] for x in (p, q)]
    return [*by_token, kl, -(np.exp(p) * p).sum(-1), (np.exp(q) * (q - p)).sum(-1)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_five_fields(temperature, dtype):
    logits, ref_logits = random(3, 5, 11, dtype=dtype), random(3, 5, 11, seed=1, dtype=dtype)
    tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(2))
    stats = token_stats(logits, ref_logits, tokens, temperature)
    fields = (*stats[:4], stats.forward_kl)
    for field, expected in zip(fields, plain(logits, ref_logits, tokens, temperature), strict=True):
        assert field.dtype == dtype
        assert np.allclose(field.numpy(), expected, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_the_gradients_are_those_of_the_definitions():
    logits, ref_logits = (random(2, 3, 7, seed=s, dtype=torch.float64).requires_grad_() for s in (0, 1))
    tokens = torch.randint(7, (2, 3), generator=torch.Generator().manual_seed(2))
    weights = random(5, 2, 3, seed=3, dtype=torch.float64)
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    slow = TokenStats(
        p.gather(-1, tokens[..., None])[..., 0],
        q.gather(-1, tokens[..., None])[..., 0],
        (p.exp() * (p - q)).sum(-1),
        -(p.exp() * p).sum(-1),
        forward_kl=(q.exp() * (q - p)).sum(-1),
    )
    ours, expected = (
        torch.autograd.grad(
            sum((w * f).sum() for w, f in zip(weights, (*stats[:4], stats.forward_kl), strict=True)),
            (logits, ref_logits),
        )
        for stats in (token_stats(logits, ref_logits, tokens), slow)
    )
    for one, other in zip(ours, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_token_values_and_their_expectation():
    logits, ref_logits = (random(2, 3, 7, seed=s, dtype=torch.float64).requires_grad_() for s in (0, 1))
    tokens = torch.randint(7, (2, 3), generator=torch.Generator().manual_seed(2))
    values, weights = random(7, seed=4), random(2, 3, seed=3, dtype=torch.float64)
    stats = token_stats(logits, ref_logits, tokens, 0.7, values)
    assert torch.equal(stats.value, values.double()[tokens])
    probabilities = (logits / 0.7).softmax(-1)
    expected = (probabilities * values.double()).sum(-1)
    assert torch.allclose(stats.expected_value, expected, atol=1e-12)
    (ours,) = torch.autograd.grad((weights * stats.expected_value).sum(), logits)
    with torch.no_grad():  # p_v (a_v - sum p a) / T
        slope = probabilities * (values.double() - expected[..., None]) / 0.7
    assert torch.allclose(ours, weights[..., None] * slope, atol=1e-12)
    short = token_stats(logits, ref_logits, tokens, 0.7, values[:4])
    padded = token_stats(logits, ref_logits, tokens, 0.7, torch.cat([values[:4], torch.zeros(3)]))
    assert all(map(torch.equal, short[4:6], padded[4:6]))
    for wrong in (torch.cat([values, values[:1]]), values[None]):
        with pytest.raises(ConfigurationError, match=r"token_values: must have shape \[7\] or be shorter"):
            token_stats(logits, ref_logits, tokens, token_values=wrong)


def test_half_precision_logits_are_read_in_float32_and_no_kl_is_negative():
    logits = random(4, 16, 500, dtype=torch.bfloat16)
    ref_logits = (logits.float() + random(4, 16, 500, seed=1, spread=1e-3)).to(torch.bfloat16)
    tokens = torch.zeros(4, 16, dtype=torch.long)
    stats = token_stats(logits, ref_logits, tokens)
    assert all(field.dtype == torch.float32 for field in stats[:4])
    assert (stats.kl >= 0).all()
    assert np.allclose(stats.kl.numpy(), plain(logits, ref_logits, tokens)[2], rtol=1e-3, atol=1e-9)
    naive = (logits.softmax(-1) * (logits.log_softmax(-1) - ref_logits.log_softmax(-1))).sum(-1)
    assert (naive < 0).any()


def test_tokens_that_both_models_exclude_contribute_nothing():
    logits, ref_logits = random(1, 2, 6, dtype=torch.float64), random(1, 2, 6, seed=1, dtype=torch.float64)
    tokens = torch.tensor([[0, 1]])
    kept = token_stats(logits[..., :4], ref_logits[..., :4], tokens, jsd_weight=0.5)
    for values in (logits, ref_logits):
        values[..., 4:] = -torch.inf
    leaf = logits.requires_grad_()
    stats = token_stats(leaf, ref_logits, tokens, jsd_weight=0.5)
    for field, expected in zip(stats, kept, strict=True):
        assert (field is None) == (expected is None)
        assert field is None or torch.allclose(field, expected)
    differentiated = stats.kl, stats.entropy, stats.forward_kl, stats.jsd
    (gradient,) = torch.autograd.grad(sum(field.sum() for field in differentiated), leaf)
    assert gradient.isfinite().all()
    assert not gradient[..., 4:].any()


def test_mass_where_the_reference_has_none_is_infinite_and_named_once():
    ref_logits = torch.zeros(1, 3, 5)
    ref_logits[..., 3] = -torch.inf
    with pytest.warns(UserWarning, match="gives probability to token 3, the reference none") as shown:
        stats = token_stats(torch.zeros(1, 3, 5), ref_logits, torch.zeros(1, 3, dtype=torch.long))
    assert len(shown) == 1
    assert stats.kl.tolist() == [[math.inf] * 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reverse = token_stats(ref_logits, torch.zeros(1, 3, 5), torch.zeros(1, 3, dtype=torch.long))
    assert torch.allclose(reverse.kl, torch.full((1, 3), math.log(5 / 4)))


@pytest.mark.parametrize("gap", [-90.0, 90.0])
def test_log_ratios_of_ninety_stay_finite(gap):
    logits = torch.zeros(1, 1, 3)
    logits[..., 0] = gap
    leaf = logits.requires_grad_()
    stats = token_stats(leaf, torch.zeros(1, 1, 3), torch.tensor([[0]]))
    expected = plain(logits.detach(), torch.zeros(1, 1, 3), torch.tensor([[0]]))
    assert [field.item() for field in (*stats[:4], stats.forward_kl)] == pytest.approx(
        [float(e[0, 0]) for e in expected], rel=1e-5, abs=1e-6
    )
    mask = torch.ones(1, 1, dtype=torch.bool)
    for estimator in (MonteCarlo, RaoBlackwell, K3LossSequence, ReleasedRaoBlackwell):
        loss = estimator(baseline=None, allow_biased=True).surrogate(stats, mask)
        (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
        assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize(
    "estimator",
    [
        MonteCarlo(),
        RaoBlackwell(),
        RaoBlackwell(off_policy="prefix"),
        ReleasedRaoBlackwell(off_policy="clip"),
    ],
)
def test_completions_of_one_token_and_of_none(estimator):
    leaf = random(4, 3, 6).requires_grad_()
    stats = token_stats(leaf, random(4, 3, 6, seed=1), torch.zeros(4, 3, dtype=torch.long))
    mask = torch.tensor([[True, False, False], [False] * 3, [True, True, True], [False] * 3])
    loss = estimator.objective(
        stats, mask, torch.arange(4.0), beta=0.3, group_size=2, behaviour_logprobs=stats.logprobs.detach()
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()
    assert gradient[mask].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: must be positive and finite, got 0.0"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.long)}, "must have shapes"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {
        "logits": torch.zeros(1, 2, 3),
        "ref_logits": torch.zeros(1, 2, 3),
        "tokens": torch.zeros(1, 2, dtype=torch.long),
    }
    with pytest.raises(ConfigurationError, match=message):
        token_stats(**arguments | change)
