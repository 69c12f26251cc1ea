"""What a model computes with padding and from cached states is tried, not looked up."""

import inspect
from types import MethodType

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families import tiny
from lit_klrb import terminal
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.capabilities import CACHE_NAMES, agree, cache_name, continues, reads_padding
from lit_klrb.models.heads import split_model
from lit_klrb.models.roles import POLICY, check_predicts

READ = {"input_ids", "attention_mask", "position_ids"}
SMALL = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8},
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    },
}


@pytest.mark.parametrize("kind", ["bart", "trocr", "rwkv", "deepseek_v4"])
def test_a_model_that_reads_padding_is_refused_in_one_line(kind):
    with pytest.raises(ConfigurationError, match=f"^key: padding on the left .* a {kind} model") as error:
        check_predicts("key", tiny(kind, dtype=torch.float32), POLICY)
    assert "\n" not in str(error.value)


def test_positions_that_count_padding_are_refused():
    """The same model reads padding or not, depending on what it does with the positions."""
    model = tiny("gpt2")
    assert not reads_padding(model)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "position_ids": None}), with_kwargs=True
    )
    assert reads_padding(model)


@pytest.mark.parametrize(
    ("kind", "expected"), [("llama", True), ("mamba", False), ("recurrent_gemma", False), ("zamba2", False)]
)
def test_states_outside_the_cache_are_noticed(kind, expected):
    assert continues(tiny(kind, dtype=torch.float32)) == expected


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_found_under_either_name(name):
    """transformers 5.24 has renamed the argument, which a signature need not show."""
    model = tiny("llama", dtype=torch.float32)
    (known,) = set(CACHE_NAMES) & {*inspect.signature(model.forward).parameters}
    forward = model.forward

    def renamed(*, use_cache, **arguments):
        cache = {known: arguments[name]} if name in arguments else {}
        return forward(use_cache=use_cache, **{key: arguments[key] for key in READ}, **cache)

    model.forward = renamed
    assert cache_name(model) == name


def test_a_model_without_a_cache_says_so_once(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "_SAID", set())
    for _ in range(2):
        assert not continues(tiny("recurrent_gemma", dtype=torch.float32))
    assert capsys.readouterr().err.count("does not continue from cached keys and values") == 1


def test_rounding_decides_nothing():
    """Trained models round more than new ones; a run that is resumed would differ if that mattered."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**SMALL, "num_hidden_layers": 24}, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
    assert continues(model)
    assert not reads_padding(model)


@pytest.mark.parametrize("cap", [2.0, 30.0, 500.0])
def test_a_cap_of_the_logits_is_noticed_at_logits_of_any_size(cap):
    """New weights give logits at which the cap is lost in rounding; trained ones do not."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma2", **SMALL, query_pre_attn_scalar=8, final_logit_softcapping=cap)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert split_model(model).softcap == cap
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    model.config.final_logit_softcapping = None
    model.forward = lambda **kwargs: capped(type(model).forward(model, **kwargs), cap)
    assert split_model(model) is None


def capped(output, cap):
    output.logits = cap * torch.tanh(output.logits / cap)
    return output


def test_accelerates_autocast_hides_nothing():
    """TRL's default is bf16=True, with which accelerate's `prepare` wraps `forward`."""
    model = tiny("llama", dtype=torch.float32)
    model._original_forward = model.forward
    in_autocast = torch.autocast("cpu", torch.bfloat16)(type(model).forward)
    model.forward = MethodType(convert_outputs_to_fp32(in_autocast), model)
    wrapped = model.forward
    split = split_model(model)
    assert split is not None
    assert split.caches
    assert model.forward is wrapped


def test_logits_agree_up_to_rounding():
    logits = torch.tensor([[1.0, -8.0]])
    assert agree(logits + 5e-3, logits)
    assert not agree(logits + 2e-2, logits)
    assert agree(logits.bfloat16() * 1.03, logits.bfloat16())
    assert not agree(logits * torch.nan, logits)
    assert not agree(logits, logits[0])
