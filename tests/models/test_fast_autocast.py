"""Passes in mixed precision cast each weight once and attend in float32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.models.heads import split_model
from lit_klrb.models.loading import freeze
from lit_klrb.models.precision import attention_in_float32
from lit_klrb.models.rollout import Rollout

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [3, 1, 4, 2, 6]])


class Seen(TorchDispatchMode):
    """Counts conversions of a tensor to bfloat16, and records the dtypes of attention."""

    def __init__(self, tensor):
        super().__init__()
        self.address, self.casts, self.attention = tensor.data_ptr(), 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16
        self.casts += cast and args[0].data_ptr() == self.address
        self.attention += [args[0].dtype] if func in ATTENTION else []
        return func(*args, **(kwargs or {}))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    ).eval()


@pytest.fixture
def lightnings():
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def sample(model):
    mask = torch.ones(1, 2, dtype=torch.bool)
    return generate_completions(model, TOKENS[:1, :2], mask, Sampling(2, 3), seed=0, ends=(), pad_token_id=0)


@pytest.mark.parametrize("frozen", [False, True])
def test_once_in_all_passes_of_a_rollout(model, lightnings, frozen):
    if frozen:
        freeze(model)
    with lightnings, Seen(model.lm_head.weight) as seen:
        sample(model)
        assert seen.casts == 1
        assert set(seen.attention) == {torch.float32}
        assert not torch.is_autocast_cache_enabled()
    assert {weight.requires_grad for weight in model.parameters()} == {not frozen}
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_once_for_prompts_and_completions(model, lightnings, mode):
    everything = torch.ones_like(TOKENS, dtype=torch.bool)
    rollout, split = Rollout(TOKENS, everything, everything[:, -2:]), split_model(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    with mode(), lightnings, Seen(weight) as seen:
        hidden = split.hidden_states(rollout)
        assert seen.casts == 1
        if mode is torch.enable_grad:
            hidden.sum().backward()
    assert set(seen.attention) == {torch.float32}
    assert hidden.requires_grad == (mode is torch.enable_grad)
    freeze(model)
    with torch.inference_mode(), lightnings:
        assert torch.equal(split.hidden_states(rollout), hidden)


def test_copies_made_without_gradients_serve_no_pass_with_them(model, lightnings):
    everything, split = torch.ones_like(TOKENS, dtype=torch.bool), split_model(model)
    with lightnings:
        sample(model)
        split.hidden_states(Rollout(TOKENS, everything, everything[:, -2:])).square().sum().backward()
    assert all(weight.grad.any() for weight in model.model.layers.parameters())


def test_nothing_changes_without_autocast_or_after_an_error(model, lightnings):
    freeze(model)
    with Seen(model.lm_head.weight) as seen:
        sample(model)
    assert seen.casts == 0
    model.register_forward_hook(lambda *_: 1 / 0)
    with lightnings, pytest.raises(ZeroDivisionError):
        sample(model)
    assert not any(weight.requires_grad for weight in model.parameters())
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_attention_with_an_additive_mask_in_bfloat16(model, lightnings):
    layer, bias = model.model.layers[0].self_attn, torch.randn(1, 2, 3, 3).bfloat16()
    parts = [torch.randn(1, heads, 3, 8) for heads in (2, 1, 1)]
    with lightnings:
        for mask, options in ((bias, {}), (None, {"position_bias": bias})):
            attended, _ = attention_in_float32(layer, *parts, mask, is_causal=False, **options)
            expected, _ = sdpa_attention_forward(layer, *parts, bias, is_causal=False)
            assert attended.dtype == torch.float32
            torch.testing.assert_close(attended, expected.float(), rtol=0.02, atol=0.02)
