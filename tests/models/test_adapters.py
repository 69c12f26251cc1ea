"""Adapters on weights that layers share."""

import pytest
import torch

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.models.adapters import add_adapter, merged

LLAMA = {
    **{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}
BOTH = ["embed_tokens", "lm_head"]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("config", "targets", "tied"),
    [
        (GPT2, ["wte"], False),
        (GPT2, ["c_attn", "wte"], False),
        (LLAMA, ["embed_tokens"], False),
        (LLAMA, ["lm_head"], False),
        (LLAMA, BOTH, False),
        ({**LLAMA, "tie_word_embeddings": False}, BOTH, False),
        (LLAMA, "all-linear", True),
    ],
)
def test_a_merged_adapter_is_the_same_model(tmp_path, config, targets, tied):
    model = loading.fresh_model(config, grammar_tokenizer(), seed=0)
    add_adapter(model, {"r": 4, "target_modules": targets}, seed=0).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.5)
    tokens = torch.arange(10)[None]
    expected = logprobs(model, tokens)
    merged(model).save_pretrained(tmp_path)
    exported = loading.load_model("key", str(tmp_path)).eval()
    for whole in (model, exported):
        torch.testing.assert_close(logprobs(whole, tokens), expected, rtol=0, atol=1e-4)
    weights = [layer.weight for layer in (exported.get_input_embeddings(), exported.get_output_embeddings())]
    assert (weights[0] is weights[1]) == tied


@torch.no_grad()
def logprobs(model, tokens):
    return model(tokens).logits.log_softmax(-1)


def test_a_weight_that_other_layers_share_gets_no_adapter():
    model = loading.fresh_model({**GPT2, "n_layer": 2}, grammar_tokenizer(), seed=0)
    first, second = model.transformer.h
    second.mlp.c_fc.weight = first.mlp.c_fc.weight
    with pytest.raises(ConfigurationError, match=r"^lora: the weight of transformer.h.0.mlp.c_fc is also"):
        add_adapter(model, {"target_modules": ["c_fc"]}, seed=0)


@pytest.mark.parametrize("extra", [{"modules_to_save": ["wte"]}, {"trainable_token_indices": [1, 2]}])
def test_what_cannot_be_merged_is_refused(extra):
    model = loading.fresh_model(GPT2, grammar_tokenizer(), seed=0)
    with pytest.raises(ConfigurationError, match="leave out modules_to_save and trainable_token_indices"):
        add_adapter(model, {"target_modules": ["c_attn"], **extra}, seed=0)
