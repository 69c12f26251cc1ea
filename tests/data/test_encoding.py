"""Every path reads a text with the same tokens before it, and ends a completion at the same tokens."""

import json
from types import SimpleNamespace

import pytest
from chat_tokenizer import chat_tokenizer, message
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from lit_klrb.comparison.inputs import encode_prompts, encode_windows
from lit_klrb.data.encoding import encode, end_tokens, ended
from lit_klrb.data.grammar import Review
from lit_klrb.data.modules import PreferenceDataModule, PromptDataModule, ReviewDataModule
from lit_klrb.data.preferences import Preference, as_tokens
from lit_klrb.data.prompts import cut_prompts
from lit_klrb.data.tokenizer import grammar_tokenizer

# The end of a turn is another token than the end of a text, as in Gemma's and Llama 3's
TURNS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|system|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def model(tokenizer):
    config = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **config))
    turn = tokenizer.convert_tokens_to_ids("<|system|>")
    model.generation_config = GenerationConfig(eos_token_id=[turn, tokenizer.eos_token_id])
    return model


def examples(data, tokenizer, model, path, row, split="train"):
    """Those of a data module that reads one row; its other splits do not interfere."""
    for name in ("train", "validation", "test"):
        path.mkdir(exist_ok=True)
        (path / f"{name}.jsonl").write_text(json.dumps(row if name == split else {"text": f"x{name}"}))
    data.source = str(path)
    learner = SimpleNamespace(
        tokenizer=tokenizer, trained=model, reads=data.contents, preference_pairs=None, given_pairs=list
    )
    data.trainer = SimpleNamespace(lightning_module=learner)
    data.reviews[split] = data.load(split)
    return data.examples(split)


def test_all_paths_read_a_text_with_the_same_bos(tmp_path, tokenizer, model):
    expected = [tokenizer.bos_token_id, *plain(tokenizer, "Good film")]
    assert encode(tokenizer, ["Good film"]) == [expected]
    assert encode_prompts("prompts", ["Good film"], tokenizer)[0].tokens == expected
    assert encode_windows("texts", ["Good film"], tokenizer, 99)[0] == [expected]
    row = {"text": "Good film"}
    (text,) = examples(ReviewDataModule(), tokenizer, model, tmp_path / "sft", row)
    assert text == [*expected, tokenizer.eos_token_id]
    for data, split in ((PromptDataModule(), "train"), (PreferenceDataModule(), "validation")):
        path = tmp_path / type(data).__name__
        (prompt,) = examples(data, tokenizer, model, path, {"prompt": "Good film"}, split)
        assert prompt.tokens == expected
        (start,) = examples(data, tokenizer, model, path / "text", row, split)
        assert start.tokens == expected[: len(start.tokens)]
        assert 1 + data.min_prompt_tokens <= len(start.tokens) <= 1 + data.max_prompt_tokens
    pairs = as_tokens("key", [Preference("Good film", "Yes", "No")], tokenizer, end_tokens(tokenizer, model))
    assert pairs[0].prompt == expected


def test_a_text_that_begins_with_a_bos_gets_no_second_one(tokenizer):
    expected = [tokenizer.bos_token_id, *plain(tokenizer, "Good film")]
    assert encode(tokenizer, ["<bos>Good film", "Good film"]) == [expected] * 2
    lengths = [len(ids) for ids in cut_prompts([Review("<bos>Good film", None)] * 9, tokenizer, 2, 4)]
    assert {3, 5} <= set(lengths) <= {3, 4, 5}


def test_what_a_tokenizer_puts_after_a_text_is_left_out():
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)],
    )
    assert tokenizer("Hi")["input_ids"][-1] == tokenizer.eos_token_id
    assert encode(tokenizer, ["Hi"]) == [[tokenizer.bos_token_id, *plain(tokenizer, "Hi")]]
    assert encode(grammar_tokenizer(), []) == []


def test_the_ends_of_a_completion_are_those_of_tokenizer_and_generation_settings(tokenizer, model):
    turn, eos = tokenizer.convert_tokens_to_ids("<|system|>"), tokenizer.eos_token_id
    assert end_tokens(tokenizer, model) == (eos, turn)
    assert end_tokens(tokenizer, SimpleNamespace(generation_config=None)) == (eos,)
    for end in (turn, eos):
        assert ended([7, end, *plain(tokenizer, "\n")], tokenizer, (eos, turn)) == [7, end]
    assert ended([7, turn, 8], tokenizer, (eos, turn)) == [7, turn, 8, eos]


def test_an_answer_ends_with_the_end_of_its_turn(tmp_path, model):
    """Not with that and an end of text, which the model would then be trained to write after it."""
    tokenizer = chat_tokenizer(TURNS)
    turn = tokenizer.convert_tokens_to_ids("<|system|>")
    chat = [message("user", "Hi"), message("assistant", "Yes")]
    (text,) = examples(ReviewDataModule(), tokenizer, model, tmp_path / "chats", {"messages": chat})
    assert tokenizer.decode(text) == "<bos><|user|>Hi<|system|>\n<|assistant|>Yes<|system|>"
    ends = end_tokens(tokenizer, model)
    (pair,) = as_tokens("key", [Preference("Hi", "Yes", "No")], tokenizer, ends, system_prompt="Be")
    assert pair.chosen == [*plain(tokenizer, "Yes"), turn]
    assert pair.rejected == [*plain(tokenizer, "No"), turn]
