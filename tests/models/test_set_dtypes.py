"""Weights, buffers and numbers of models whose files have 16 bits, compared with what transformers loads."""

import copy

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from benchmarks.families import tiny
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.adapters import add_adapter
from lit_klrb.models.capabilities import SHORT, probe_tokens
from lit_klrb.models.dtypes import Rounding, convert, rounding, set_dtypes
from lit_klrb.models.heads import split_model
from lit_klrb.models.loading import freeze
from lit_klrb.models.roles import POLICY, check_predicts

# The least share of weights that keep 16 bits under mixed precision. Gemma's embedding multiplies what it
# looks up, experts have products of their own, and not all of Mamba's are rounded.
KINDS = {
    "llama": 0.95,
    "gpt2": 0.95,
    "opt": 0.8,
    "gemma3_text": 0.8,
    "mamba": 0,
    "xglm": 0.8,
    "mixtral": 0.2,
}


def load(folder, **settings):
    return freeze(AutoModelForCausalLM.from_pretrained(folder, **settings))


def short_share(model):
    sizes = [(weight.numel(), weight.dtype in SHORT) for weight in model.parameters()]
    return sum(size for size, short in sizes if short) / sum(size for size, _ in sizes)


@torch.no_grad()
def logits(model, **autocast):
    tokens, mask = probe_tokens(model)
    with torch.autocast("cpu", torch.bfloat16, **autocast):
        return model(input_ids=tokens, attention_mask=mask).logits


@pytest.mark.parametrize("file", SHORT)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_transformers_in_the_same_dtype(tmp_path, kind, file):
    tiny(kind, dtype=torch.float32).to(file).save_pretrained(tmp_path)
    whole, short, bfloat16 = load(tmp_path), load(tmp_path), load(tmp_path)
    set_dtypes(whole, "32-true")
    set_dtypes(short, "bf16-mixed")
    set_dtypes(bfloat16, "bf16-true")
    assert {weight.dtype for weight in whole.parameters()} == {torch.float32}
    assert {weight.dtype for weight in bfloat16.parameters()} == {torch.bfloat16}
    assert short_share(short) >= KINDS[kind]
    expected = load(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(whole, enabled=False), logits(expected, enabled=False))
    assert torch.equal(logits(short), logits(expected))
    assert torch.equal(
        logits(bfloat16, enabled=False), logits(load(tmp_path, dtype=torch.bfloat16), enabled=False)
    )
    set_dtypes(short, "32-true")  # as for a trainer with another precision
    assert torch.equal(logits(short, enabled=False), logits(expected, enabled=False))


def model_of(dtype=torch.bfloat16, **settings):
    model = freeze(tiny("llama", dtype=torch.float32, **settings)).to(dtype)
    model.config.dtype = dtype
    return model


def test_weights_with_which_numbers_differ_are_float32():
    model = model_of()
    layer = model.model.layers[1].mlp
    forward = layer.forward
    # The sum of weights of 16 bits is rounded to them
    layer.forward = lambda inputs: forward(inputs) * layer.up_proj.weight.abs().sum()
    set_dtypes(model, "bf16-mixed")
    assert short_share(model) == 0
    layer.forward = lambda inputs: forward(inputs) * linear(inputs, layer.up_proj.weight).sum()
    model = model.bfloat16()
    set_dtypes(model, "bf16-mixed")
    assert short_share(model) > 0.95


def test_a_trained_weight_is_float32_and_an_adapters_base_is_not():
    trained, adapted = model_of().requires_grad_(True), model_of()
    add_adapter(adapted, {"r": 2}, seed=0)
    for model in (trained, adapted):
        set_dtypes(model, "bf16-mixed")
        assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    assert short_share(trained) == 0
    assert short_share(adapted) > 0.8
    # As in a checkpoint, whose weights are read as float32
    convert(adapted, torch.float32)
    set_dtypes(adapted, "bf16-mixed")
    assert short_share(adapted) > 0.8


def test_no_digit_of_a_frozen_weight_is_lost():
    model = model_of()
    convert(model, torch.float32)
    with torch.no_grad():
        model.lm_head.weight += 1e-6  # a trained model, from a file in bfloat16
    before = copy.deepcopy(model.state_dict())
    set_dtypes(model, "bf16-mixed")
    assert all(torch.equal(weight.float(), before[name]) for name, weight in model.state_dict().items())
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", SHORT)
def test_trials_do_not_depend_on_the_dtype_of_the_weights(dtype):
    """With the tolerance of bfloat16, none of these differences would show."""
    model = model_of(dtype)
    assert split_model(model).caches
    forward = model.forward
    model.forward = lambda *args, **inputs: louder(forward(*args, **inputs), 1.01)
    assert split_model(model) is None
    model.forward = lambda *args, **inputs: louder(
        forward(*args, **inputs), 1 + 0.01 * (inputs["attention_mask"] == 0).any()
    )
    with pytest.raises(ConfigurationError, match=r"^padding on the left"):
        check_predicts(None, model, POLICY)
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def louder(output, factor):
    output.logits = output.logits * factor
    return output


def test_updates_that_rounding_undoes_are_counted():
    """Against a plain loop over weights of all sizes."""
    torch.manual_seed(0)
    before = (torch.randn(400) * 10 ** torch.linspace(-3, 2, 400)).bfloat16().float()
    layer = torch.nn.Linear(400, 1, bias=False)
    layer.weight.data = (before * (1 + torch.logspace(-5, -1, 400)))[None]
    layer.weight.data[0, :7] = before[:7]
    moved = lost = 0
    for old, new in zip(before.tolist(), layer.weight[0].tolist(), strict=True):
        moved += old != new
        lost += old != new and torch.tensor(new, dtype=torch.bfloat16).item() == old
    found = rounding(layer, torch.bfloat16, {"weight": before[None]})
    assert (found.moved, found.lost) == (moved, lost)
    assert 50 < lost < 350
    assert rounding(layer, torch.bfloat16, {}) == Rounding(found.changed, 0, 0)
    assert rounding(layer, torch.float32, {"weight": before[None]}) == Rounding(0, moved, 0)
