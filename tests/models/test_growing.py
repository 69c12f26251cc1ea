"""Logits of sequences that grow are those of whole sequences, also in memory that does not move."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lit_klrb import terminal
from lit_klrb.models.growing import Growing, InPlace, records
from lit_klrb.models.trials import position_ids

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
RECORDED = {"gpt2": GPT2, "llama": LLAMA, "qwen3": LLAMA, "gpt_neox": LLAMA}
# A window of tokens, distances that are computed from the mask, and states other than keys and values
PLAIN = {
    "mistral": {**LLAMA, "sliding_window": 4},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
PROMPTS = torch.tensor([[1, 2, 3], [0, 0, 4]])
MASK = torch.tensor([[True, True, True], [False, False, True]])


def make(kind, **settings):
    torch.manual_seed(0)
    small = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **{**small, **{**RECORDED, **PLAIN}[kind], **settings})
    return AutoModelForCausalLM.from_config(config).double().eval()


@torch.no_grad()
def grown(sequences):
    """Logits of the sequences as they grow, are repeated, and leave in another order."""
    found = [sequences.logits().clone()]
    sequences.keep(torch.tensor([0, 0, 1]))
    for step, tokens in enumerate(([5, 6, 7], [8, 9, 10], [11, 12], [13, 14])):
        if step == 2:
            sequences.keep(torch.tensor([2, 0]))
        sequences.append(torch.tensor(tokens))
        found.append(sequences.logits().clone())
    return found


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


@pytest.mark.parametrize("kind", RECORDED)
@pytest.mark.parametrize("sequences", [Growing, InPlace])
def test_logits_are_those_of_whole_sequences(kind, sequences):
    model = make(kind)
    assert records(model)
    for ours, plain in zip(grown(sequences(model, PROMPTS, MASK, room=4)), whole(model), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_keys_and_values_stay_where_they_are_and_are_cast_once():
    sequences = Growing(make("gpt2").float(), PROMPTS, MASK, room=3)
    places = []
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(4):
            sequences.logits()
            sequences.append(torch.tensor([5, 6]))
            layers = sequences._cache.layers
            places += [[(s.dtype, s.data_ptr()) for s in (layer.keys, layer.values)] for layer in layers]
    assert places[2:4] == places[4:6] == places[6:]
    assert {dtype for layer in places[2:] for dtype, _ in layer} == {torch.float32}


@pytest.mark.parametrize("sequences", [Growing, InPlace])
def test_more_tokens_than_there_is_room_for_are_an_error(sequences):
    with pytest.raises((RuntimeError, IndexError)):
        grown(sequences(make("gpt2"), PROMPTS, MASK, room=3))


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_pass_leaves_what_was_asked_of_operations_as_it_was(mode):
    torch.set_deterministic_debug_mode(mode)
    try:
        grown(InPlace(make("llama"), PROMPTS, MASK, room=4))
        assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(("kind", "settings"), [*PLAIN.items(), ("mistral", {"sliding_window": 1000})])
def test_a_model_that_needs_memory_that_moves_is_not_recorded(kind, settings):
    assert not records(make(kind, **settings))


def test_a_model_that_computes_otherwise_in_memory_that_does_not_move_is_not_recorded(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "_SAID", set())

    def shift(module, args, kwargs):
        return args, kwargs | {"position_ids": kwargs["position_ids"] + (kwargs["attention_mask"].ndim == 4)}

    model = make("gpt2")
    model.register_forward_pre_hook(shift, with_kwargs=True)
    assert not records(model)
    assert "sampling from a gpt2 model takes longer than recorded passes would" in capsys.readouterr().err
