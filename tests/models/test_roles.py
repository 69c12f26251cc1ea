"""Valid and invalid configurations of models for a role."""

import pytest
import torch

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.loading import fresh_model
from lit_klrb.models.roles import CLASSIFIER, POLICY, check_predicts

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
BERT = {
    **{"model_type": "bert", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "max_position_embeddings": 16},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 2}, r"gpt2 has no setting n_layers \(did you mean n_layer\?\)"),
        ({"vocab_size": 3}, "vocab_size follows from the tokenizer"),
        ({"eos_token_id": 3}, "eos_token_id follows from the tokenizer"),
        ({"n_head": 0}, "'n_head': 0.*by zero"),
        ({"n_head": 3}, "'n_head': 3"),
        ({"n_embd": 0}, "'n_embd': 0.*negative power"),
        ({"n_positions": 0}, "leaves the weight transformer.wpe.weight empty"),
        ({"n_embd": -1}, "n_embd must not be negative, got -1"),
        ({"activation_function": "nothing"}, "'nothing'"),
        ({"model_type": "nothing"}, "model_type must be .* got 'nothing'"),
        ({"model_type": None}, "model_type must be .* got None"),
    ],
)
def test_what_makes_no_model_is_named(change, message):
    with pytest.raises(ConfigurationError, match=f"^policy_config: .*{message}"):
        fresh_model({**GPT2, **change}, grammar_tokenizer(), seed=0)


def test_an_encoder_is_no_policy_and_may_be_a_classifier():
    with pytest.raises(ConfigurationError, match="bert model reads the tokens it should predict"):
        fresh_model(BERT, grammar_tokenizer(), seed=0)
    fresh_model({**BERT, "is_decoder": True}, grammar_tokenizer(), seed=0)
    fresh_model(BERT, grammar_tokenizer(), seed=0, role=CLASSIFIER)


def test_a_model_whose_logits_are_no_numbers_is_no_policy():
    model = fresh_model(GPT2, grammar_tokenizer(), seed=0)
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = float("nan")
    with pytest.raises(ConfigurationError, match="policy_path: its weights give logits that are not finite"):
        check_predicts("policy_path", model, POLICY)


def test_looking_at_a_model_leaves_it_as_it_was():
    model = fresh_model(GPT2, grammar_tokenizer(), seed=0)
    for training in (True, False):
        model.train(training)
        before = torch.get_rng_state()
        check_predicts(None, model, POLICY)
        assert model.training == training
        assert torch.equal(torch.get_rng_state(), before)
