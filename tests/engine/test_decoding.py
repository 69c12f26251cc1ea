"""Decoded logits are those of whole sequences, with static buffers too."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lit_klrb import terminal
from lit_klrb.engine.decoding import Decoder, StaticDecoder, captures_graphs
from lit_klrb.models.capabilities import position_ids

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
CAPTURED = {"gpt2": GPT2, "llama": LLAMA, "qwen3": LLAMA, "gpt_neox": LLAMA}
# A window of tokens, distances that are computed from the mask, and states other than keys and values
DYNAMIC = {
    "mistral": {**LLAMA, "sliding_window": 4},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
PROMPTS = torch.tensor([[1, 2, 3], [0, 0, 4]])
MASK = torch.tensor([[True, True, True], [False, False, True]])


def make(kind, **settings):
    torch.manual_seed(0)
    small = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **{**small, **{**CAPTURED, **DYNAMIC}[kind], **settings})
    return AutoModelForCausalLM.from_config(config).double().eval()


@torch.no_grad()
def decoded(decoder):
    """Logits at each step, while sequences are repeated, dropped and reordered."""
    logits = [decoder.logits().clone()]
    decoder.keep(torch.tensor([0, 0, 1]))
    for step, tokens in enumerate(([5, 6, 7], [8, 9, 10], [11, 12], [13, 14])):
        if step == 2:
            decoder.keep(torch.tensor([2, 0]))
        decoder.append(torch.tensor(tokens))
        logits.append(decoder.logits().clone())
    return logits


@torch.no_grad()
def whole(model):
    """The same from whole sequences."""
    rows = [(0, [5, 8]), (0, [6, 9]), (1, [7, 10])]
    found = [[(0, []), (1, [])], [(row, added[:1]) for row, added in rows], rows]
    found += [[(1, [7, 10, 11]), (0, [5, 8, 12])], [(1, [7, 10, 11, 13]), (0, [5, 8, 12, 14])]]
    for batch in found:
        tokens = torch.tensor([[*PROMPTS[row].tolist(), *added] for row, added in batch])
        mask = torch.tensor([[*MASK[row].tolist(), *[True] * len(added)] for row, added in batch])
        yield model(input_ids=tokens, attention_mask=mask, position_ids=position_ids(mask)).logits[:, -1]


@pytest.mark.parametrize("kind", CAPTURED)
@pytest.mark.parametrize("decoder", [Decoder, StaticDecoder])
def test_logits_are_those_of_whole_sequences(kind, decoder):
    model = make(kind)
    assert captures_graphs(model)
    for logits, expected in zip(
        decoded(decoder(model, PROMPTS, MASK, max_new_tokens=4)), whole(model), strict=True
    ):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_keys_and_values_are_not_copied_and_are_cast_once():
    decoder = Decoder(make("gpt2").float(), PROMPTS, MASK, max_new_tokens=3)
    buffers = []
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(4):
            decoder.logits()
            decoder.append(torch.tensor([5, 6]))
            layers = decoder._cache.layers
            buffers += [[(s.dtype, s.data_ptr()) for s in (layer.keys, layer.values)] for layer in layers]
    assert buffers[2:4] == buffers[4:6] == buffers[6:]
    assert {dtype for layer in buffers[2:] for dtype, _ in layer} == {torch.float32}


@pytest.mark.parametrize("decoder", [Decoder, StaticDecoder])
def test_more_tokens_than_are_allocated_are_an_error(decoder):
    with pytest.raises((RuntimeError, IndexError)):
        decoded(decoder(make("gpt2"), PROMPTS, MASK, max_new_tokens=3))


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_the_deterministic_mode_is_restored(mode):
    torch.set_deterministic_debug_mode(mode)
    try:
        decoded(StaticDecoder(make("llama"), PROMPTS, MASK, max_new_tokens=4))
        assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(("kind", "settings"), [*DYNAMIC.items(), ("mistral", {"sliding_window": 1000})])
def test_a_model_with_dynamic_buffers_is_not_captured(kind, settings):
    assert not captures_graphs(make(kind, **settings))


def test_a_model_with_other_logits_from_static_buffers_is_not_captured(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "_SAID", set())

    def shift(module, args, kwargs):
        return args, kwargs | {"position_ids": kwargs["position_ids"] + (kwargs["attention_mask"].ndim == 4)}

    model = make("gpt2")
    model.register_forward_pre_hook(shift, with_kwargs=True)
    assert not captures_graphs(model)
    assert "a gpt2 model is sampled without CUDA graphs" in capsys.readouterr().err
