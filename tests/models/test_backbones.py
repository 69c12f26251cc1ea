"""A classifier on the backbone of another model: its hidden states, a new head, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, BertConfig
from written import save

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.models.adapters import adapter_settings, add_adapter
from lit_klrb.models.backbones import classifier_on

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 1, "n_positions": 16}
BERT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
LABELS = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
TOKENS = torch.tensor([[5, 6, 7, 8], [9, 4, 3, 2]])


def on(path, seed=0, **settings):
    return classifier_on("backbone_path", str(path), {**LABELS, **settings}, seed)


def hidden(model):
    return model.eval().base_model(TOKENS).last_hidden_state


@pytest.fixture
def policy():
    return loading.fresh_model(GPT2, grammar_tokenizer(), seed=3)


@pytest.fixture
def folder(policy, tmp_path):
    return save(tmp_path / "policy", policy, grammar_tokenizer())


@pytest.fixture
def encoder(tmp_path):
    tokenizer = grammar_tokenizer()
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = AutoModelForMaskedLM.from_config(BertConfig(**BERT, **ids))
    return save(tmp_path / "encoder", model, tokenizer)


def checkpoint(model, path):
    """The policy's checkpoint, as a module writes it."""
    content = {
        "policy_config": loading.config_dict(model),
        "state_dict": {f"policy.{name}": value for name, value in model.state_dict().items()},
        loading.ADAPTER_KEY: adapter_settings(model),
        loading.TOKENIZER_KEY: loading.tokenizer_files(grammar_tokenizer()),
    }
    torch.save(content, path)
    return path


@pytest.fixture(params=["folder", "checkpoint"])
def source(request, policy, folder, tmp_path):
    """The policy as a folder and as a checkpoint."""
    return folder if request.param == "folder" else checkpoint(policy, tmp_path / "last.ckpt")


def test_the_backbone_is_the_policys_and_the_head_follows_from_the_seed(policy, source):
    before = torch.get_rng_state()
    model, tokenizer = on(source)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(hidden(model), hidden(policy))
    assert model.score.weight.shape == (2, 8)
    assert model.config.label2id == LABELS["label2id"]
    assert tokenizer.get_vocab() == grammar_tokenizer().get_vocab()
    assert torch.equal(on(source)[0].score.weight, model.score.weight)
    assert not torch.equal(on(source, seed=1)[0].score.weight, model.score.weight)


def test_an_encoder_gets_a_pooler_and_a_head(encoder):
    model, _ = on(encoder)
    assert torch.equal(hidden(model), hidden(AutoModelForMaskedLM.from_pretrained(encoder)))
    assert torch.equal(on(encoder)[0].bert.pooler.dense.weight, model.bert.pooler.dense.weight)


def test_settings_change_those_of_the_model(source):
    assert on(source)[0].config.resid_pdrop == 0.1
    model, _ = on(source, resid_pdrop=0.7)
    assert {model.transformer.h[0].mlp.dropout.p, model.transformer.h[0].attn.resid_dropout.p} == {0.7}


def test_fewer_layers_keep_the_first(policy, source):
    model, _ = on(source, n_layer=1)
    policy.transformer.h = policy.transformer.h[:1]
    assert torch.equal(hidden(model), hidden(policy))


def test_padding_is_not_read(folder):
    """The head reads the last token that is not padding."""
    model, tokenizer = on(folder)
    padded = torch.cat([TOKENS, torch.full((2, 3), tokenizer.pad_token_id)], 1)
    mask = (torch.arange(7) < 4).long().expand(2, -1)
    model.eval()
    expected = model(TOKENS, attention_mask=torch.ones_like(TOKENS)).logits
    assert torch.allclose(model(padded, attention_mask=mask).logits, expected, atol=1e-6)


def test_an_adapter_is_merged(policy, tmp_path):
    adapted = add_adapter(policy, {"r": 2}, seed=0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    model, _ = on(checkpoint(adapted, tmp_path / "last.ckpt"))
    assert torch.allclose(hidden(model), hidden(adapted), atol=1e-5)
    assert not getattr(model, "peft_config", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_embd": 16}, r"the weight \S+ has the shape \[.+\]; the settings make it \[.+\]"),
        ({"n_layer": 3}, r"it has no weights for \S*h\.2\.\S+"),
        ({"resid_dropout": 0.7}, r"gpt2 has no setting resid_dropout \(did you mean resid_pdrop\?\)"),
        ({"vocab_size": 3}, "vocab_size follows from backbone_path"),
        ({"resid_pdrop": "a"}, "resid_pdrop"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit_are_named(source, settings, message):
    with pytest.raises(ConfigurationError, match=f"(?s)^(backbone_path|classifier_config): .*{message}"):
        on(source, **settings)


def test_a_classifier_has_a_head(tmp_path):
    model = loading.fresh_model({**GPT2, **LABELS}, grammar_tokenizer(), 0, loading.CLASSIFIER)
    save(tmp_path, model, grammar_tokenizer())
    with pytest.raises(
        ConfigurationError, match="it is a classifier already, which is given as classifier_path"
    ):
        on(tmp_path)


def test_a_part_that_is_missing_is_not_made_up(folder, encoder):
    for place, name in (
        (folder, "transformer.h.0.mlp.c_fc.weight"),
        (encoder, "bert.embeddings.LayerNorm.bias"),
    ):
        weights = load_file(place / "model.safetensors")
        save_file(
            {k: v for k, v in weights.items() if k != name}, place / "model.safetensors", {"format": "pt"}
        )
        with pytest.raises(
            ConfigurationError, match=f"^backbone_path: {place}: it has no weights for {name}$"
        ):
            on(place)
