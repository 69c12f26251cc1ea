"""A model with some layers of another equals one put together by hand, and is an ordinary model."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.backbones import with_layers
from lit_klrb.rollouts.scoring import completion_logits

IDS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8},
}
SLIDING = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
KINDS = {
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2},
    "gpt_neox": {**LLAMA, "rotary_pct": 0.5},
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 3},
    "qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 3, "layer_types": SLIDING},
    "gemma2": {**LLAMA, "query_pre_attn_scalar": 8, "sliding_window": 3, "layer_types": SLIDING},
    "smollm3": {**LLAMA, "no_rope_layers": [1, 0, 1, 1]},
    "gpt_neo": {
        **{"hidden_size": 16, "num_layers": 4, "num_heads": 2, "window_size": 3},
        "attention_types": [[["global", "local"], 2]],
    },
}
LAYERS = [3, 0, 1]


def whole(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **IDS, **KINDS[kind])).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def by_hand(model, layers):
    """The same model whose list of layers is shorter; for passes without a cache."""
    model = copy.deepcopy(model)
    backbone, config = model.base_model, model.config
    name = "h" if hasattr(backbone, "h") else "layers"
    stack = getattr(backbone, name)
    setattr(backbone, name, torch.nn.ModuleList(stack[index] for index in layers))
    for key in ("layer_types", "no_rope_layers"):
        if getattr(config, key, None) is not None:
            setattr(config, key, [getattr(config, key)[index] for index in layers])
    config.num_hidden_layers = len(layers)
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_kept_layers_are_a_model_of_their_own(kind, tmp_path):
    model, tokens = whole(kind), torch.arange(1, 25).view(2, 12)
    before = logits(model, tokens)
    kept = with_layers(model, LAYERS)
    assert kept.config.num_hidden_layers == 3
    assert torch.equal(logits(model, tokens), before), "the other model is as it was"
    expected = logits(by_hand(model, LAYERS), tokens)
    assert (expected - before).abs().max() > 1e-2
    assert torch.allclose(logits(kept, tokens), expected, atol=0.001)
    kept.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.allclose(logits(loaded, tokens), expected, atol=0.001)
    # Nearly zero temperature: with a cache each token is the most likely one without
    everything = torch.ones_like(tokens, dtype=torch.bool)
    sampling = Sampling(completions_per_prompt=2, max_new_tokens=5, temperature=0.001)
    rollout = generate_completions(kept, tokens, everything, sampling, seed=0, ends=(), pad_token_id=0)
    assert torch.equal(completion_logits(kept, rollout).argmax(-1), rollout.completions)


def test_all_layers_are_the_same_model():
    model, tokens = whole("qwen2"), torch.arange(1, 25).view(2, 12)
    assert torch.equal(logits(with_layers(model, range(4)), tokens), logits(model, tokens))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "must be different indices of layers, from 0, got \\[\\]"),
        ([0, -1], "must be different indices of layers, from 0, got \\[0, -1\\]"),
        ([1, 1], "must be different indices of layers, from 0, got \\[1, 1\\]"),
        ([0, 4], "4 is not a layer: they are 0 to 3"),
    ],
)
def test_wrong_layers_are_refused(layers, message):
    with pytest.raises(ConfigurationError, match=f"^policy_layers: {message}"):
        with_layers(whole("llama"), layers)


def test_layers_that_depend_on_their_place_are_refused():
    """`mlp_only_layers` names the layers without experts by their place."""
    experts = {"num_experts": 2, "moe_intermediate_size": 8, "mlp_only_layers": [3]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **IDS, **LLAMA, **experts))
    with pytest.raises(
        ConfigurationError, match=r"^policy_layers: layers of a qwen3_moe model cannot be moved"
    ):
        with_layers(model, [3, 0])
