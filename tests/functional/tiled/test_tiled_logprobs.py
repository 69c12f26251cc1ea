"""`tiled_logprobs` against log_softmax of full logits."""

import math

import pytest
import torch
from test_tiled_resources import Recorder
from tiled_cases import assert_close, capped, gradients, make_case, weights_like

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import tiled_logprobs
from lit_klrb.functional.tiled import head, inputs, logprobs as module

SOME = torch.arange(5) < torch.tensor([[2], [0], [5]])


def plain(case, leaves, temperature=1.0, softcap=None):
    hidden, weight, bias = leaves
    logits = capped(hidden @ weight.T + (0 if bias is None else bias), softcap) / temperature
    return logits.log_softmax(-1).gather(-1, case.tokens[..., None])[..., 0]


@pytest.fixture(autouse=True)
def _tiles(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", -1)


@pytest.mark.parametrize("way", ["retained", "recomputed", "at once"])
@pytest.mark.parametrize(("temperature", "softcap", "biased"), [(1.0, None, False), (0.7, 2.0, True)])
@pytest.mark.parametrize("tile_size", [None, 4])
def test_values_and_gradients(way, temperature, softcap, biased, tile_size, monkeypatch):
    if way == "recomputed":
        monkeypatch.setattr(inputs, "_RETAINED_LOGITS", 0)
    elif way == "at once":
        monkeypatch.setattr(module, "_AT_ONCE", 2**20)
    case = make_case()
    leaves = case.leaves() if biased else (*case.leaves()[:2], None)
    weights = weights_like(case.tokens)
    for mask in (None, SOME):
        inside = torch.ones_like(weights) if mask is None else mask.double()
        expected = inside * plain(case, leaves, temperature, softcap)
        junk = torch.where(inside > 0, 0, torch.nan)[..., None]
        options = {"bias": leaves[2], "temperature": temperature, "logit_softcap": softcap}
        ours = tiled_logprobs(
            leaves[0] + junk, leaves[1], case.tokens, **options, tile_size=tile_size, mask=mask
        )
        assert_close([ours], [expected])
        losses = [(weights * logprobs).square().sum() for logprobs in (ours, expected)]
        given = [leaf for leaf in leaves if leaf is not None]
        wanted = torch.autograd.grad(losses[1], given)
        for _ in range(2):  # twice, as retained logits are overwritten by the first
            assert_close(torch.autograd.grad(losses[0], given, retain_graph=True), wanted)


@pytest.mark.parametrize("way", ["retained", "recomputed", "at once"])
def test_several_tokens_at_each_position(way, monkeypatch):
    if way == "recomputed":
        monkeypatch.setattr(inputs, "_RETAINED_LOGITS", 0)
    elif way == "at once":
        monkeypatch.setattr(module, "_AT_ONCE", 2**20)
    case, columns = make_case(), (0, 3, 0)
    leaves = case.leaves()
    tokens = torch.stack([(case.tokens + shift) % len(case.weight) for shift in columns], -1)
    weights = torch.linspace(-1, 2, tokens.numel(), dtype=torch.float64).view(tokens.shape)
    options = {"bias": leaves[2], "temperature": 0.7, "logit_softcap": 2.0, "tile_size": 4, "mask": SOME}
    ours = tiled_logprobs(*leaves[:2], tokens, **options)
    options = {"temperature": 0.7, "softcap": 2.0}
    one_by_one = [plain(case._replace(tokens=t), leaves, **options) for t in tokens.unbind(-1)]
    expected = SOME[..., None] * torch.stack(one_by_one, -1)
    assert_close([ours], [expected])
    losses = [(weights * logprobs).square().sum() for logprobs in (ours, expected)]
    assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


@pytest.mark.parametrize("retained", [True, False])
def test_excluded_tokens_and_extreme_logits(retained, monkeypatch):
    if not retained:
        monkeypatch.setattr(inputs, "_RETAINED_LOGITS", 0)
    case = make_case()
    case.bias[7:15] = -math.inf  # a block and more
    case.bias[3] = -720.0  # its probability is subnormal
    case = case._replace(tokens=case.tokens.masked_fill((case.tokens >= 7) & (case.tokens < 15), 0))
    leaves, weights = case.leaves(), weights_like(case.tokens)
    ours = tiled_logprobs(*leaves[:2], case.tokens, bias=leaves[2])
    expected = plain(case, leaves)
    assert_close([ours], [expected])
    assert_close(gradients((weights * ours).sum(), leaves), gradients((weights * expected).sum(), leaves))


def test_products_and_memory(monkeypatch):
    monkeypatch.setattr(head, "_CPU_BLOCK", 64)
    case = make_case(batch=8, length=8, size=2, vocabulary=401)
    whole = case.tokens.numel() * case.weight.numel()
    found = []
    for retained in (64 * 401, 64 * 401 - 1):
        monkeypatch.setattr(inputs, "_RETAINED_LOGITS", retained)
        with Recorder() as record:
            tiled_logprobs(*case.leaves()[:2], case.tokens).sum().backward()
        found.append((record.products / whole, record.largest))
    assert found == [(3, 64 * 64), (4, 64 * 64)]  # retained logits are separate blocks
    with torch.no_grad(), Recorder() as record:
        tiled_logprobs(*case.leaves()[:2], case.tokens)
    assert record.products == whole


@pytest.mark.parametrize("at_once", [-1, 2**20])
def test_lower_precision_is_computed_in_float32(at_once, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    case = make_case(dtype=torch.bfloat16)
    leaves = case.leaves()
    double = tuple(leaf.detach().double().requires_grad_() for leaf in leaves)
    ours, expected = tiled_logprobs(*leaves[:2], case.tokens, bias=leaves[2]), plain(case, double)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)
    got, wanted = gradients(ours.sum(), leaves), gradients(expected.sum(), double)
    assert [gradient.dtype for gradient in got] == [torch.bfloat16] * 3
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("name", "value"), [("mask", SOME[:2]), ("bias", torch.zeros(4)), ("tile_size", 0)])
def test_wrong_arguments_are_named(name, value):
    case = make_case()
    with pytest.raises(ConfigurationError, match=f"^{name}: must"):
        tiled_logprobs(case.hidden, case.weight, case.tokens, **{name: value})
    with pytest.raises(ConfigurationError, match=r"^hidden: must have shape"):
        tiled_logprobs(case.hidden[:1], case.weight, case.tokens)
