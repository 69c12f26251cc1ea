"""Infinite divergences, large vocabularies and low precision."""

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
