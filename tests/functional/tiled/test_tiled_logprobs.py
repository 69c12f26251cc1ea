"""`tiled_logprobs`; `test_any_input` compares it with float64."""

import pytest
import torch
from test_tiled_resources import Recorder
from tiled_cases import assert_close, capped, gradients, make_case, weights_like

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import tiled_logprobs
from lit_klrb.functional.tiled import head, inputs, logprobs as module


@pytest.fixture(autouse=True)
def _tiles(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", -1)


@pytest.mark.parametrize("retained", [True, False])
def test_no_bias_and_a_second_backward_pass(retained, monkeypatch):
    """Neither of which `test_any_input` has."""
    if not retained:
        monkeypatch.setattr(inputs, "_RETAINED_LOGITS", 0)
    case, weights = make_case(), weights_like(make_case().tokens)
    leaves = case.leaves()[:2]
    logits = capped(leaves[0] @ leaves[1].T, 2.0)
    expected = logits.log_softmax(-1).gather(-1, case.tokens[..., None])[..., 0]
    ours = tiled_logprobs(*leaves, case.tokens, logit_softcap=2.0, tile_size=4)
    assert_close([ours], [expected])
    losses = [(weights * logprobs).sum() for logprobs in (ours, expected)]
    wanted = gradients(losses[1], leaves)
    for _ in range(2):  # twice, as retained logits are overwritten by the first
        assert_close(torch.autograd.grad(losses[0], leaves, retain_graph=True), wanted)


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


@pytest.mark.parametrize(
    ("name", "value"), [("mask", torch.ones(2, 5) > 0), ("bias", torch.zeros(4)), ("tile_size", 0)]
)
def test_wrong_arguments_are_named(name, value):
    case = make_case()
    with pytest.raises(ConfigurationError, match=f"^{name}: must"):
        tiled_logprobs(case.hidden, case.weight, case.tokens, **{name: value})
    with pytest.raises(ConfigurationError, match=r"^hidden: must have shape"):
        tiled_logprobs(case.hidden[:1], case.weight, case.tokens)
