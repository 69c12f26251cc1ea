import math
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TokenStats, clipped_loss, tiled_policy_loss, tiled_token_stats, token_stats
from lit_klrb.functional.tiled import blocks, head


class Case(NamedTuple):
    """Arguments of the tiled operations; the first three take gradients."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    ref_bias: Tensor
    tokens: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(tensor.detach().requires_grad_() for tensor in self[:3])


def make_case(batch=3, length=5, size=4, vocabulary=23, dtype=torch.float64, seed=0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, spread=1.0):
        return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    hidden, weight = normal(batch, length, size), normal(vocabulary, size)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator)
    return Case(
        hidden,
        weight,
        normal(vocabulary),
        hidden + normal(batch, length, size, spread=0.3),
        weight + normal(vocabulary, size, spread=0.3),
        normal(vocabulary),
        tokens,
    )


def weights_like(tokens: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens.shape, generator=generator, dtype=torch.float64)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def plain_stats(
    case: Case, leaves, temperature=1.0, softcap=None, ref_softcap=None, token_values=None
) -> TokenStats:
    """The definition: full logits, `token_stats`, autograd."""
    hidden, weight, bias = leaves
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    ref_logits = case.ref_hidden @ case.ref_weight.T + (0 if case.ref_bias is None else case.ref_bias)
    both = capped(logits, softcap), capped(ref_logits, ref_softcap)
    return token_stats(*both, case.tokens, temperature, token_values)


def tiled_stats(case: Case, leaves, **options) -> TokenStats:
    hidden, weight, bias = leaves
    return tiled_token_stats(
        hidden,
        weight,
        case.ref_hidden,
        case.ref_weight,
        case.tokens,
        bias=bias,
        ref_bias=case.ref_bias,
        **options,
    )


def tiled_loss(case: Case, leaves, mask, score_weights, kl_weights, **options):
    hidden, weight, bias = leaves
    return tiled_policy_loss(
        hidden,
        weight,
        case.ref_hidden,
        case.ref_weight,
        case.tokens,
        mask,
        score_weights,
        kl_weights,
        bias=bias,
        ref_bias=case.ref_bias,
        **options,
    )


def present(stats: TokenStats) -> list[Tensor]:
    return [field for field in stats if field is not None]


def token_values(case: Case) -> Tensor:
    return torch.linspace(-1, 2, len(case.weight), dtype=case.weight.dtype).square()


def gradients(loss: Tensor, leaves) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


def assert_close(got, expected, tolerance=1e-12) -> None:
    got, expected = present(got), present(expected)
    assert len(got) == len(expected)
    for left, right in zip(got, expected, strict=True):
        assert left.shape == right.shape
        torch.testing.assert_close(left.double(), right.double(), rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks, and a shorter one at the end, for the vocabularies of these tests."""
    monkeypatch.setattr(head, "_CPU_BLOCK", 7)


READINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "capped": {"logit_softcap": 2.0, "ref_logit_softcap": 3.0, "temperature": 1.5},
    "policy_capped": {"logit_softcap": 1.5},
    "small_tiles": {"tile_size": 4},
    "one_row": {"tile_size": 1},
    "token_values": {"token_values": token_values(make_case()), "tile_size": 4},
    "token_values_capped": {"token_values": token_values(make_case()), "logit_softcap": 1.5},
}


def plain_options(options: dict) -> dict:
    names = {"logit_softcap": "softcap", "ref_logit_softcap": "ref_softcap"}
    return {names.get(name, name): value for name, value in options.items() if name != "tile_size"}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("reading", READINGS)
def test_statistics_and_gradients_are_those_of_whole_logits(reading, biased):
    case, options = make_case(), READINGS[reading]
    leaves = case.leaves()
    if not biased:
        case, leaves = case._replace(ref_bias=None), (*leaves[:2], None)
    got, expected = tiled_stats(case, leaves, **options), plain_stats(case, leaves, **plain_options(options))
    assert_close(got, expected)
    for fields in ([0], [2], [3], [0, 2, 3], *([[5], [0, 2, 3, 5]] if got.value is not None else [])):
        weights = [weights_like(case.tokens, seed) for seed in fields]
        losses = [
            sum((weight * stats[field]).sum() for field, weight in zip(fields, weights, strict=True))
            for stats in (got, expected)
        ]
        results = [
            torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], retain_graph=True)
            for loss in losses
        ]
        assert_close(*results)


@pytest.mark.parametrize("ratio", ["none", "plain", "clipped"])
@pytest.mark.parametrize("reading", READINGS)
def test_loss_is_the_composition_of_token_stats_and_autograd(reading, ratio):
    case, options = make_case(), dict(READINGS[reading])
    leaves = case.leaves()
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    score_weights, kl_weights = weights_like(case.tokens), weights_like(case.tokens, 2)
    expected = plain_stats(case, leaves, **plain_options(options))
    behaviour = expected.logprobs.detach() + 0.5 * weights_like(case.tokens, 3)
    score = expected.logprobs
    if ratio != "none":
        options["behaviour_logprobs"] = behaviour
        score = (expected.logprobs - behaviour).exp()
    if ratio == "clipped":
        options["clip_range"] = 0.2
        outside = ((score - 1).abs() > 0.2)[mask]
        assert outside.any()
        assert not outside.all()
        score_loss = clipped_loss((expected.logprobs - behaviour) * mask, score_weights * mask, 0.2) * 3
    else:
        score_loss = (score_weights * score)[mask].sum()
    expected_loss = (score_loss + (kl_weights * expected.kl)[mask].sum()) / 3
    if "token_values" in options:
        options["value_weights"] = weights_like(case.tokens, 4)
        value_loss = (options["value_weights"] * expected.expected_value)[mask].sum() / 3
        expected_loss = expected_loss + value_loss
    loss, stats = tiled_loss(case, leaves, mask, score_weights, kl_weights, **options)
    assert_close([loss], [expected_loss])
    assert_close(stats, expected.masked(mask))
    assert not any(field.requires_grad for field in present(stats))
    assert_close(gradients(loss, leaves), gradients(expected_loss, leaves))


def test_gradients_pass_gradcheck():
    case = make_case(batch=2, length=2, size=3, vocabulary=9)

    def statistics(hidden, weight, bias):
        options = {"temperature": 0.8, "logit_softcap": 4.0, "tile_size": 3}
        stats = tiled_stats(case, (hidden, weight, bias), **options, token_values=token_values(case))
        return stats.logprobs, stats.kl, stats.entropy, stats.expected_value

    assert torch.autograd.gradcheck(statistics, case.leaves())


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_positions_outside_the_mask_influence_nothing(junk):
    case = make_case()
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    weights = [weights_like(case.tokens, seed) for seed in (1, 2, 3, 4)]
    values = token_values(case)
    results = []
    for spoil in (False, True):
        these, (score_weights, kl_weights, behaviour, value_weights) = case, weights
        if spoil:
            outside = ~mask
            these = case._replace(
                hidden=case.hidden.masked_fill(outside[..., None], junk),
                ref_hidden=case.ref_hidden.masked_fill(outside[..., None], junk),
                tokens=case.tokens.masked_fill(outside, -100),
            )
            score_weights, kl_weights, behaviour, value_weights = (
                w.masked_fill(outside, junk) for w in weights
            )
        leaves = these.leaves()
        loss, stats = tiled_loss(
            these,
            leaves,
            mask,
            score_weights,
            kl_weights,
            behaviour_logprobs=behaviour,
            clip_range=0.2,
            token_values=values,
            value_weights=value_weights,
        )
        general = tiled_stats(these, leaves, mask=mask, token_values=values)
        total = sum(field.sum() for field in present(general))
        results.append(
            [loss, *present(stats), *gradients(loss, leaves), *present(general), *gradients(total, leaves)]
        )
        assert all((field[~mask] == 0).all() for field in stats)
    for clean, spoilt in zip(*results, strict=True):
        assert torch.equal(clean, spoilt)


def test_an_all_masked_batch_has_zero_loss_and_zero_gradients():
    case = make_case()
    leaves = case.leaves()
    nothing = torch.zeros_like(case.tokens, dtype=torch.bool)
    loss, stats = tiled_loss(case, leaves, nothing, weights_like(case.tokens), weights_like(case.tokens))
    total = sum(field.sum() for field in present(tiled_stats(case, leaves, mask=nothing)))
    for value in (loss, total):
        assert value == 0
        assert all((gradient == 0).all() for gradient in gradients(value, leaves))
    assert all((field == 0).all() for field in present(stats))


def test_one_token_completions():
    case = make_case(batch=4, length=1)
    leaves = case.leaves()
    assert_close(tiled_stats(case, leaves), plain_stats(case, leaves))


def test_tokens_that_both_models_exclude_count_for_nothing():
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


def test_mass_where_the_reference_has_none_is_an_infinite_kl_and_a_warning_that_names_the_token():
    case = make_case()
    leaves = case.leaves()
    score = (weights_like(case.tokens) * plain_stats(case, leaves).logprobs).sum() / 3
    case.ref_bias[9] = -math.inf
    with pytest.warns(UserWarning, match=r"\+inf.*token 9,"):
        stats = tiled_stats(case, leaves)
    assert (stats.kl == math.inf).all()
    assert stats.entropy.isfinite().all()
    mask = torch.ones_like(case.tokens, dtype=torch.bool)
    mask, weights = case.tokens >= 0, weights_like(case.tokens)
    with pytest.warns(UserWarning, match=r"\+inf.*token 9,"):
        loss, _ = tiled_loss(case, leaves, mask, weights, torch.zeros_like(weights))
    expected = gradients(score, leaves)  # the gradient of the score alone, as the KL has weight 0
    assert_close(gradients(loss, leaves), expected)
    assert_close(gradients((weights * stats.logprobs).sum() / 3, leaves), expected)


def test_the_policy_may_exclude_what_the_reference_does_not():
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


def in_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


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


def test_half_precision_weights_are_read_in_float32():
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


def test_autocast_does_not_reach_the_products():
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


def test_a_vocabulary_of_152_thousand(monkeypatch):
    monkeypatch.undo()
    case = make_case(batch=1, length=3, size=2, vocabulary=151_936, dtype=torch.float32)
    leaves, exact_leaves = case.leaves(), tuple(leaf.detach().double().requires_grad_() for leaf in case[:3])
    exact = plain_stats(Case(*map(in_double, case)), exact_leaves, token_values=token_values(case).double())
    mask, weights = torch.ones(1, 3, dtype=torch.bool), weights_like(case.tokens)
    valued = {"token_values": token_values(case), "value_weights": weights}
    loss, stats = tiled_loss(case, leaves, mask, weights, weights, **valued)
    assert_close(stats, exact, 1e-5)
    total = (weights * (exact.logprobs + exact.kl + exact.expected_value)).sum()
    expected = gradients(total, exact_leaves)
    # How exact a float32 sum over the vocabulary is depends on the CPU: plain autograd is the measure
    plain_leaves = case.leaves()
    plain = plain_stats(case, plain_leaves, token_values=token_values(case))
    total = (weights.float() * (plain.logprobs + plain.kl + plain.expected_value)).sum()
    for ours, theirs, exact_gradient in zip(
        gradients(loss, leaves), gradients(total, plain_leaves), expected, strict=True
    ):
        error, plain_error = ((found.double() - exact_gradient).abs().max() for found in (ours, theirs))
        assert error <= 2 * plain_error + 1e-6


@pytest.mark.parametrize("tied", ["heads", "states"])
def test_models_may_share_head_or_hidden_states(tied):
    case = make_case()
    leaves = case.leaves()
    if tied == "heads":
        case = case._replace(ref_weight=leaves[1], ref_bias=leaves[2])
    else:
        case = case._replace(ref_hidden=leaves[0])
    constant = Case(*(tensor.detach() for tensor in case))
    got, expected = tiled_stats(case, leaves), plain_stats(constant, leaves)
    weights = weights_like(case.tokens)
    assert_close(got, expected)
    assert_close(
        gradients((weights * got.kl).sum(), leaves), gradients((weights * expected.kl).sum(), leaves)
    )


class Recorder(TorchDispatchMode):
    """Records the largest tensor that an operation returns, and the size of matrix products."""

    largest = 0
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            self.products += left.numel() * right.shape[1]
        return result


@pytest.mark.parametrize("operation", ["stats", "loss"])
def test_nothing_as_large_as_the_logits_is_ever_made(operation, monkeypatch):
    monkeypatch.setattr(head, "_CPU_BLOCK", 64)
    case = make_case(batch=8, length=8, size=2, vocabulary=401)
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)
    largest = {}
    for tile_size in (4, 64):
        with Recorder() as record:
            options = {"token_values": token_values(case), "tile_size": tile_size}
            if operation == "stats":
                total = sum(field.sum() for field in present(tiled_stats(case, leaves, **options)))
            else:
                total, _ = tiled_loss(case, leaves, mask, weights, weights, value_weights=weights, **options)
            total.backward()
        largest[tile_size] = record.largest
    if operation == "stats":
        assert largest == {64: 64 * 64, 4: 64 * 7 * 7}  # a block; sums of 7 blocks
    else:
        assert largest == {64: 64 * 401, 4: 4 * 401}  # a tile


def test_token_values_and_their_weights_come_together():
    case = make_case()
    weights = weights_like(case.tokens)
    for options in ({"token_values": token_values(case)}, {"value_weights": weights}):
        with pytest.raises(ConfigurationError, match="value_weights: must be given together with"):
            tiled_loss(case, case.leaves(), case.tokens >= 0, weights, weights, **options)
    with pytest.raises(ConfigurationError, match=r"token_values: must have shape \[23\], got \[22\]"):
        tiled_stats(case, case.leaves(), token_values=token_values(case)[1:])


def test_matrix_products_made():
    case = make_case()
    hidden, weight, bias = leaves = case.leaves()
    everything, some = case.tokens >= 0, torch.arange(5) < torch.tensor([[2], [0], [1]])
    weights = weights_like(case.tokens)

    def products(run, *arguments) -> float:
        with Recorder() as record:
            run(*arguments)
        return record.products / (case.tokens.numel() * case.weight.numel())

    def loss(leaves, mask):
        tiled_loss(case, leaves, mask, weights, weights)[0].backward()

    def stats(leaves, mask):
        tiled_stats(case, leaves, mask=mask).kl.sum().backward()

    assert products(loss, leaves, everything) == 4
    assert products(stats, leaves, None) == 6
    assert products(loss, (hidden, weight.detach(), bias.detach()), everything) == 3
    assert products(loss, (hidden.detach(), weight, bias.detach()), everything) == 3
    assert products(loss, leaves, some) == pytest.approx(4 * 3 / 15)
    assert products(stats, leaves, some) == pytest.approx(6 * 3 / 15)
    with torch.no_grad():
        assert products(tiled_loss, case, leaves, everything, weights, weights) == 2
        assert products(tiled_stats, case, leaves) == 2


def test_the_loss_is_scaled_and_handed_over_once():
    case = make_case()
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)
    whole = gradients(tiled_loss(case, leaves, mask, weights, weights)[0], leaves)
    loss, _ = tiled_loss(case, leaves, mask, weights, weights)
    (loss / 4).backward(retain_graph=True)
    assert_close([leaf.grad for leaf in leaves], [gradient / 4 for gradient in whole])
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_backward_refuses_a_head_that_has_changed():
    case = make_case()
    leaves = case.leaves()
    total = tiled_stats(case, leaves).kl.sum()
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: must be positive, got 0.0"),
        ({"tile_size": 0}, "tile_size: must be positive, got 0"),
        ({"logit_softcap": -1.0}, "logit_softcap: must be positive, got -1.0"),
        ({"ref_logit_softcap": 0.0}, "ref_logit_softcap: must be positive, got 0.0"),
        ({"bias": torch.zeros(5)}, r"bias: must have shape \[23\], got \[5\]"),
        ({"ref_bias": torch.zeros(5)}, r"ref_bias: must have shape \[23\], got \[5\]"),
        ({"hidden": torch.zeros(3, 5, 3)}, r"hidden: must have shape \[3, 5, 4\], got \[3, 5, 3\]"),
        ({"ref_hidden": torch.zeros(3, 4, 4)}, r"ref_hidden: must have shape \[3, 5, 4\], got \[3, 4, 4\]"),
        ({"ref_weight": torch.zeros(22, 4)}, r"ref_weight: must have shape \[23, 4\], got \[22, 4\]"),
        ({"mask": torch.ones(3, 4) > 0}, r"mask: must have shape \[3, 5\], got \[3, 4\]"),
        ({"kl_weights": torch.zeros(5)}, r"kl_weights: must have shape \[3, 5\], got \[5\]"),
        ({"score_weights": torch.zeros(5)}, r"score_weights: must have shape \[3, 5\], got \[5\]"),
        ({"behaviour_logprobs": torch.zeros(5)}, r"behaviour_logprobs: must have shape \[3, 5\], got \[5\]"),
        (
            {"behaviour_logprobs": torch.zeros(3, 5), "clip_range": 0.0},
            "clip_range: must be positive, got 0.0",
        ),
        ({"clip_range": 0.2}, "clip_range: must be None without behaviour_logprobs, got 0.2"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    case = make_case()
    arguments = case._asdict() | {"mask": case.tokens >= 0}
    arguments |= {"score_weights": torch.zeros(3, 5), "kl_weights": torch.zeros(3, 5)} | change
    with pytest.raises(ConfigurationError, match="^" + message):
        tiled_policy_loss(**arguments)


def test_blocks_are_compiled_on_request_only(monkeypatch):
    compiled = []
    monkeypatch.setattr(blocks, "_compiled", lambda body: compiled.append(body) or body)
    case = make_case()
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)

    def run():
        tiled_loss(case, leaves, mask, weights, weights)
        tiled_stats(case, leaves).kl.sum().backward()

    run()
    monkeypatch.setenv("LIT_KLRB_COMPILE", "0")
    run()
    assert not compiled
    monkeypatch.setenv("LIT_KLRB_COMPILE", "1")
    run()
    assert set(compiled) == {blocks.block_sums, blocks.block_gradient, blocks.block_recomputed_gradient}
    monkeypatch.setenv("LIT_KLRB_COMPILE", "yes")
    with pytest.raises(ConfigurationError, match="LIT_KLRB_COMPILE: must be 0, 1 or auto, got 'yes'"):
        run()


def test_passes_over_a_few_rows_at_a_time_give_the_same(monkeypatch):
    case = make_case()
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)
    results = []
    for elements in (2**20, 3 * len(case.weight)):  # whole tiles; three rows
        monkeypatch.setattr(blocks, "_ELEMENTS_PER_PASS", elements)
        valued = {"token_values": token_values(case)}
        loss, stats = tiled_loss(case, leaves, mask, weights, weights, **valued, value_weights=weights)
        general = tiled_stats(case, leaves, **valued)
        total = (weights * (general.logprobs + general.kl + general.entropy + general.expected_value)).sum()
        results.append(
            [loss, *present(stats), *gradients(loss, leaves), *present(general), *gradients(total, leaves)]
        )
    assert_close(*results)


@pytest.mark.slow
def test_compiled_blocks_give_the_same(monkeypatch):
    case = make_case()
    case.bias[9] = case.ref_bias[9] = -math.inf
    case = case._replace(tokens=case.tokens.masked_fill(case.tokens == 9, 8))
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)
    results = []
    for setting in ("0", "1"):
        monkeypatch.setenv("LIT_KLRB_COMPILE", setting)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of inductor
            valued = {"token_values": token_values(case)}
            options = {**valued, "value_weights": weights, "tile_size": 4}
            loss, stats = tiled_loss(case, leaves, mask, weights, weights, **options)
            general = tiled_stats(case, leaves, temperature=0.7, **valued)
            total = (
                weights * (general.logprobs + general.kl + general.entropy + general.expected_value)
            ).sum()
            results.append(
                [
                    loss,
                    *present(stats),
                    *gradients(loss, leaves),
                    *present(general),
                    *gradients(total, leaves),
                ]
            )
    assert_close(*results)


def test_calls_that_share_their_memory_do_not_disturb_each_other(monkeypatch):
    """Later calls do not overwrite results: a small call after a large one, training after inference."""
    monkeypatch.setattr(blocks, "_WORKSPACE", blocks._Workspace())
    large, small = make_case(vocabulary=41), make_case(batch=1, seed=2)

    def run(case):
        leaves = case.leaves()
        mask, scores = torch.ones_like(case.tokens, dtype=torch.bool), weights_like(case.tokens)
        loss, stats = tiled_policy_loss(
            *leaves[:2],
            *case[3:5],
            case.tokens,
            mask,
            scores,
            scores.abs(),
            bias=leaves[2],
            ref_bias=case[5],
        )
        loss.backward()
        return [*present(stats), *(leaf.grad for leaf in leaves)]

    with torch.inference_mode():
        tiled_token_stats(*large[:2], *large[3:5], large.tokens)
    first = run(large)
    kept = [tensor.clone() for tensor in first]
    memory = {key: tensor.data_ptr() for key, tensor in blocks._WORKSPACE._buffers.items()}
    expected = run(small)
    assert {key: tensor.data_ptr() for key, tensor in blocks._WORKSPACE._buffers.items()} == memory
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    monkeypatch.setattr(blocks, "_WORKSPACE", blocks._Workspace())
    assert all(torch.equal(a, b) for a, b in zip(run(small), expected, strict=True))
