"""Layers whose products are computed otherwise give the same results, and are as before afterwards."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from lit_klrb.engine import packed_weights as packing
from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.engine.packed_weights import packed_weights
from lit_klrb.models import linear_layers
from lit_klrb.models.adapters import add_adapter
from lit_klrb.models.heads import split_model
from lit_klrb.models.linear_layers import quick_layers
from lit_klrb.models.rollout import Rollout

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture
def llama():
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 256, "attention_bias": True}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**size, **heads)).eval()


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=1, n_head=4, vocab_size=256, **ends)).eval()


def packed_layers(model):
    return sum("forward" in vars(module) for module in model.modules())


def with_noise(model):
    """Every weight is one that matters: biases and adapters begin with 0."""
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return model


@torch.no_grad()
def compare(model, layers, tolerance=1e-5):
    before, expected = {name: w.clone() for name, w in model.state_dict().items()}, model(TOKENS).logits
    with packed_weights(model, 2, 8):
        assert packed_layers(model) == layers
        logits = model(TOKENS).logits
    assert logits.dtype == expected.dtype
    assert (logits - expected).abs().max() < tolerance * expected.abs().max()
    assert packed_layers(model) == 0
    assert torch.equal(model(TOKENS).logits, expected)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_linear_layers_and_the_head(llama):
    compare(with_noise(llama), layers=8)


def test_layers_of_gpt2_which_store_the_transpose(gpt2):
    compare(with_noise(gpt2), layers=5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_is_merged_into_the_copies(family, request):
    model = add_adapter(request.getfixturevalue(family), {"r": 2, "target_modules": "all-linear"}, 0)
    adapted = sum(
        type(m.get_base_layer()) in (nn.Linear, Conv1D) for m in model.modules() if hasattr(m, "lora_A")
    )
    compare(with_noise(model), layers=adapted + 1)


@pytest.mark.parametrize("other", ["use_dora", "lora_bias"])
def test_other_variants_of_an_adapter_stay_as_they_are(llama, other):
    model = with_noise(add_adapter(llama, {"r": 2, other: True, "target_modules": ["q_proj"]}, 0))
    compare(model, layers=8)


def test_in_autocasts_precision_except_where_a_layer_is_outside_of_it(llama):
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no packed products in bfloat16")
    model, head = with_noise(llama), llama.lm_head.forward
    with torch.autocast("cpu", torch.bfloat16):
        compare(model, layers=8, tolerance=0.02)
        with packed_weights(model, 2, 8), torch.autocast("cpu", enabled=False), torch.no_grad():
            states = torch.randn(2, 256)
            assert torch.equal(model.lm_head(states), head(states))


def test_sampling_uses_them_for_more_than_a_few_tokens(llama):
    seen = set()
    llama.register_forward_hook(lambda *_: seen.add(packed_layers(llama)))
    mask, ends = torch.ones_like(TOKENS, dtype=torch.bool), {"ends": (), "pad_token_id": 0}
    for new, expected in ((7, {0}), (8, {8})):
        seen.clear()
        generate_completions(llama, TOKENS, mask, Sampling(2, new), seed=0, **ends)
        assert seen == expected


def test_small_layers_and_double_precision_stay_as_they_are(llama, monkeypatch, capsys):
    with packed_weights(llama.double(), 2, 8):
        assert packed_layers(llama) == 0
    assert not capsys.readouterr().err
    monkeypatch.setattr(packing, "LEAST_WEIGHTS", 1 << 17)
    with packed_weights(llama.float(), 2, 8):
        assert packed_layers(llama) == 0


def test_a_forward_pass_that_another_library_has_replaced_stays(llama):
    theirs = llama.lm_head.forward = lambda states: states
    with packed_weights(llama, 2, 8):
        assert packed_layers(llama) == 8
        assert llama.lm_head.forward is theirs
    assert llama.lm_head.forward is theirs


def test_without_onednn_sampling_goes_on_and_says_so(llama, monkeypatch, capsys):
    monkeypatch.setattr(packing.torch.ops, "mkldnn", None)
    with packed_weights(llama, 2, 8):
        assert packed_layers(llama) == 0
    assert "weights are not packed for sampling, which takes longer: " in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(linear_layers, "onednn_is_quicker", lambda: True)


@pytest.mark.parametrize(("family", "layers"), [("llama", 7), ("gpt2", 4)])
def test_passes_with_gradients_are_the_same_by_quick_products(family, layers, request, quick, monkeypatch):
    model = with_noise(request.getfixturevalue(family))
    rollout = Rollout(TOKENS, torch.ones_like(TOKENS, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool))
    split, seen = split_model(model), []
    model.base_model.register_forward_hook(lambda *_: seen.append(packed_layers(model)))

    def gradients():
        split.hidden_states(rollout).square().sum().backward()
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
        return found

    ours = gradients()
    monkeypatch.setattr(linear_layers, "onednn_is_quicker", lambda: False)
    assert packed_layers(model) == 0
    expected = gradients()
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() < 1e-5 * gradient.norm(), name
    assert seen == [layers, 0]


def test_layers_that_are_small_double_or_under_autocast_are_not_quick(llama, quick, monkeypatch):
    with torch.autocast("cpu", torch.bfloat16), quick_layers(llama):
        assert packed_layers(llama) == 0
    with quick_layers(llama.double()):
        assert packed_layers(llama) == 0
    monkeypatch.setattr(linear_layers, "LEAST_WEIGHTS", 1 << 17)
    with quick_layers(llama.float()):
        assert packed_layers(llama) == 0
