"""Saving and loading policies and tokenizers."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.activations import NewGELUActivation

from lit_klrb.cli.export import export_checkpoint
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading

TINY = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16},
}


def logits_of(model, tokenizer):
    tokens = tokenizer("What a marvelous thriller!", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.eval()(tokens).logits


def checkpoint_of(model, tokenizer, path):
    state = {f"policy.{key}": value for key, value in model.state_dict().items()}
    content = {loading.POLICY.config_key: loading.config_dict(model), "state_dict": state}
    torch.save({**content, loading.TOKENIZER_KEY: loading.tokenizer_files(tokenizer)}, path)
    return str(path)


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=lambda config: config["model_type"])
def test_a_model_and_its_tokenizer_come_back_from_a_checkpoint_and_from_an_export(tmp_path, config):
    tokenizer = loading.load_tokenizer("key", "grammar")
    model = loading.fresh_model(config, tokenizer, seed=1)
    path = checkpoint_of(model, tokenizer, tmp_path / "last.ckpt")
    export_checkpoint(path, str(tmp_path / "folder"))
    for place in (path, str(tmp_path / "folder")):
        again, its_tokenizer = loading.load_model("key", place), loading.load_tokenizer("key", place)
        assert torch.equal(logits_of(again, its_tokenizer), logits_of(model, tokenizer))
        assert its_tokenizer.get_vocab() == tokenizer.get_vocab()
        assert its_tokenizer.eos_token_id == tokenizer.eos_token_id
        assert its_tokenizer.pad_token_id == tokenizer.pad_token_id


def test_gelu_new_is_one_operation_wherever_a_model_comes_from(tmp_path):
    tokenizer = loading.load_tokenizer("key", "grammar")
    model = loading.fresh_model(TINY, tokenizer, seed=1)
    path = checkpoint_of(model, tokenizer, tmp_path / "last.ckpt")
    export_checkpoint(path, str(tmp_path / "folder"))
    unfused = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert type(unfused.transformer.h[0].mlp.act) is NewGELUActivation
    assert unfused.config.activation_function == "gelu_new"
    for fused in (model, *(loading.load_model("key", place) for place in (path, str(tmp_path / "folder")))):
        assert not any(isinstance(module, NewGELUActivation) for module in fused.modules())
        torch.testing.assert_close(logits_of(fused, tokenizer), logits_of(unfused, tokenizer))


def test_fresh_weights_depend_on_the_seed_alone_and_fit_the_tokenizer():
    tokenizer = grammar_tokenizer()
    first = loading.fresh_model(TINY, tokenizer, seed=1)
    torch.rand(5)
    state = torch.get_rng_state()
    same, other = (loading.fresh_model(TINY, tokenizer, seed=seed) for seed in (1, 2))
    assert torch.equal(state, torch.get_rng_state())
    weights = [model.get_output_embeddings().weight for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].shape == (len(tokenizer), 8)
    assert first.config.eos_token_id == tokenizer.eos_token_id


def test_a_tokenizer_without_a_padding_token_pads_with_its_end_and_on_the_left(tmp_path):
    tokenizer = grammar_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = None, "right"
    tokenizer.save_pretrained(tmp_path)
    loaded = loading.load_tokenizer("key", str(tmp_path))
    assert loaded.pad_token_id == tokenizer.eos_token_id
    assert loaded.padding_side == "left"


def test_a_frozen_model_has_no_dropout_and_no_gradients():
    model = loading.freeze(loading.fresh_model(TINY, grammar_tokenizer(), seed=0).train())
    assert not any(part.training for part in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_hub_ids_are_told_from_places_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    local = ["folder", "a.ckpt", "runs/a/last.ckpt", "./x", "/x", "~/x", "a/b/c"]
    assert all(loading.looks_local(path) for path in local)
    assert not any(loading.looks_local(path) for path in ("gpt2", "lvwerra/gpt2-imdb"))
    loading.check_exists("key", "lvwerra/gpt2-imdb")
    with pytest.raises(ConfigurationError, match="key: a/b/c does not exist"):
        loading.check_exists("key", "a/b/c")


def test_a_checkpoint_of_something_else(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    with pytest.raises(
        ConfigurationError, match="contains no policy: it was not written by a lit_klrb module"
    ):
        loading.load_tokenizer("key", str(tmp_path / "last.ckpt"))
