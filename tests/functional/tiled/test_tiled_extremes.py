"""Excluded tokens, large log ratios, large vocabularies and low precision."""

import math

import pytest
import torch
from tiled_cases import (
    Case,
    assert_close,
    gradients,
    in_double,
    make_case,
    plain_stats,
    present,
    tiled_loss,
    tiled_stats,
    weights_like,
)

from lit_klrb.functional import TopK


def test_tokens_that_both_models_exclude_have_no_influence():
    case = make_case()
    banned = torch.arange(23) % 5 == 0
    banned[7:14] = True  # a whole block
    case = case._replace(
        bias=case.bias.masked_fill(banned, -math.inf),
        ref_bias=case.ref_bias.masked_fill(banned, -math.inf),
        tokens=torch.full_like(case.tokens, 4),
    )
    leaves = case.leaves()
    kept = Case(*(t[~banned] if len(t) == 23 else t for t in case[:6]), torch.full_like(case.tokens, 3))
    assert case.weight[~banned][3].equal(case.weight[4])
    mask = torch.ones_like(case.tokens, dtype=torch.bool)
    score_weights, kl_weights = weights_like(case.tokens), weights_like(case.tokens, 2)
    kept_leaves = kept.leaves()
    expected = plain_stats(kept, kept_leaves)
    expected_loss = (score_weights * expected.logprobs + kl_weights * expected.kl).sum() / 3
    loss, stats = tiled_loss(case, leaves, mask, score_weights, kl_weights)
    general = tiled_stats(case, leaves)
    assert_close(stats, expected)
    assert_close(general, expected)
    general_loss = (score_weights * general.logprobs + kl_weights * general.kl).sum() / 3
    expected_gradients = gradients(expected_loss, kept_leaves)
    for value in (loss, general_loss):
        hidden, weight, bias = gradients(value, leaves)
        assert_close([hidden, weight[~banned], bias[~banned]], expected_gradients)
        assert (weight[banned] == 0).all()
        assert (bias[banned] == 0).all()


@pytest.mark.parametrize("topk", [None, TopK(23)])
def test_a_token_that_only_the_reference_excludes_gives_an_infinite_kl_and_a_warning(topk):
    case = make_case()
    leaves = case.leaves()
    score = (weights_like(case.tokens) * plain_stats(case, leaves).logprobs).sum() / 3
    case.ref_bias[9] = -math.inf
    with pytest.warns(UserWarning, match=r"\+inf.*token 9,"):
        stats = tiled_stats(case, leaves, topk=topk)
    assert ((stats.head_kl if topk else stats.kl) == math.inf).all()
    assert stats.entropy.isfinite().all()
    mask, weights = case.tokens >= 0, weights_like(case.tokens)
    with pytest.warns(UserWarning, match=r"\+inf.*token 9,"):
        loss, _ = tiled_loss(case, leaves, mask, weights, torch.zeros_like(weights), topk=topk)
    expected = gradients(score, leaves)  # the gradient of the score alone, as the KL has weight 0
    assert_close(gradients(loss, leaves), expected)
    assert_close(gradients((weights * stats.logprobs).sum() / 3, leaves), expected)


def test_an_infinite_forward_kl_of_a_head_has_a_gradient_only_with_a_weight_of_zero():
    case = make_case()
    case.bias[9] = -math.inf
    case = case._replace(tokens=case.tokens.masked_fill(case.tokens == 9, 8))
    leaves = case.leaves()
    for read in (tiled_stats, plain_stats):
        infinite = read(case, leaves, topk=TopK(23)).head_forward_kl
        assert (infinite == math.inf).all()
        for weight, expected in ((1.0, math.nan), (0.0, 0.0)):
            hidden, *_ = torch.autograd.grad(
                infinite, leaves[:1], torch.full_like(infinite, weight), retain_graph=True
            )
            torch.testing.assert_close(hidden, torch.full_like(hidden, expected), equal_nan=True)


def test_the_policy_may_exclude_tokens():
    case = make_case()
    case.bias[9] = -math.inf
    leaves = case.leaves()
    case = case._replace(tokens=case.tokens.masked_fill(case.tokens == 9, 8))
    got, expected = tiled_stats(case, leaves), plain_stats(case, leaves)
    assert_close(got, expected)
    assert got.kl.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_log_ratios_of_ninety_are_finite(sign, dtype):
    case = make_case(dtype=dtype)
    case.ref_bias[:] = case.bias
    case.ref_weight[:] = case.weight
    case = case._replace(ref_hidden=case.hidden.clone())
    case.ref_bias[3] += 90.0 * sign
    leaves = case.leaves()
    got, expected = (
        tiled_stats(case, leaves),
        plain_stats(Case(*map(in_double, case)), map(in_double, leaves)),
    )
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert_close(got, expected, tolerance)
    assert all(gradient.isfinite().all() for gradient in gradients(got.kl.sum(), leaves))


@pytest.mark.parametrize("scale", [1e-3, 1e-1, 1.0])
def test_float32_is_accurate_and_never_negative(scale):
    """Close models whose logits are large and shifted against each other: a small KL of large numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 8, 16, generator=generator), torch.randn(5003, 16, generator=generator)
    case = Case(
        hidden,
        weight,
        torch.full((5003,), -60.0),
        hidden,
        weight,
        scale * torch.randn(5003, generator=generator) - 30,
        torch.randint(5003, (2, 8), generator=generator),
    )
    exact = plain_stats(Case(*map(in_double, case)), tuple(map(in_double, case[:3])))
    stats = tiled_stats(case, case.leaves())
    assert (stats.kl >= 0).all()
    assert_close(stats, exact, 1e-5)
    assert ((stats.kl - exact.kl).abs() < 2e-7 + 5e-6 * exact.kl).all()
    assert (tiled_stats(case, case.leaves()).kl - stats.kl).abs().max() == 0


def test_half_precision_weights_are_converted_to_float32():
    case = make_case(batch=4, length=64, size=32, vocabulary=301, dtype=torch.bfloat16)
    exact_leaves = tuple(leaf.detach().double().requires_grad_() for leaf in case[:3])
    exact = plain_stats(Case(*map(in_double, case)), exact_leaves)
    mask = torch.ones_like(case.tokens, dtype=torch.bool)
    weights = weights_like(case.tokens)
    expected = gradients((weights * (exact.logprobs + exact.kl)).sum() / 4, exact_leaves)
    leaves = case.leaves()
    loss, stats = tiled_loss(case, leaves, mask, weights, weights)
    general = tiled_stats(case, leaves)
    for got, result in (
        (stats, gradients(loss, leaves)),
        (general, gradients((weights.float() * (general.logprobs + general.kl)).sum() / 4, leaves)),
    ):
        assert all(field.dtype == torch.float32 for field in present(got))
        assert_close(got, exact, 2e-5)
        for gradient, true in zip(result, expected, strict=True):
            assert gradient.dtype == torch.bfloat16
            error = (gradient.double() - true).norm() / true.norm()
            assert error < 2**-8  # the error of rounding the result, not of summing in bfloat16


def test_autocast_has_no_effect():
    case = make_case(dtype=torch.float32)
    leaves = case.leaves()
    mask = torch.ones_like(case.tokens, dtype=torch.bool)
    weights = weights_like(case.tokens)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss, stats = tiled_loss(case, leaves, mask, weights, weights)
            general = tiled_stats(case, leaves)
            results.append(
                [
                    loss,
                    *present(stats),
                    *gradients(loss, leaves),
                    *present(general),
                    *gradients(general.kl.sum(), leaves),
                ]
            )
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
