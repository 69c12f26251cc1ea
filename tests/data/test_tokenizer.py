"""Tokenizers reproduce text, have fixed ids, and can be used for generation."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lit_klrb.data.grammar import ReviewGrammar, split_words
from lit_klrb.data.tokenizer import grammar_tokenizer, train_bpe
from lit_klrb.errors import ConfigurationError


@pytest.fixture(scope="module")
def texts():
    return [review.text for review in ReviewGrammar().reviews(300, seed=1)]


@pytest.fixture(scope="module")
def words():
    return grammar_tokenizer()


@pytest.fixture(scope="module")
def bpe(texts):
    return train_bpe(texts, vocab_size=400)


def test_grammar_tokenizer_has_one_token_a_word_and_is_lossless(words, texts):
    for text, ids in zip(texts, words(texts)["input_ids"], strict=True):
        assert len(ids) == len(split_words(text))
        assert words.unk_token_id not in ids
        assert words.decode(ids) == text


def test_grammar_tokenizer_ids_are_stable(words):
    assert isinstance(words, PreTrainedTokenizerFast)
    assert (words.pad_token_id, words.eos_token_id, words.unk_token_id) == (0, 1, 2)
    vocabulary = ReviewGrammar().vocabulary
    assert len(words) == 3 + len(vocabulary)
    assert [words(word)["input_ids"] for word in vocabulary] == [[i] for i in range(3, len(words))]


def test_grammar_tokenizer_reads_special_tokens_and_unknown_words(words):
    ids = words("Superb film<eos>")["input_ids"]
    assert ids[0] == words.unk_token_id
    assert ids[2] == words.eos_token_id
    assert words.decode([words.pad_token_id, *ids[1:]], skip_special_tokens=True) == "film"


def test_bpe_is_lossless_on_any_text(bpe, texts):
    for text in [*texts[:20], "  two  spaces\n\nand é, 電影, 🎬\t!", "", " leading"]:
        assert bpe.decode(bpe(text)["input_ids"]) == text


def test_bpe_learns_from_its_corpus(bpe, texts):
    assert len(bpe) == 400
    assert (bpe.pad_token_id, bpe.eos_token_id) == (0, 1)
    assert bpe.convert_tokens_to_ids("Ġthe") != bpe.convert_tokens_to_ids("Ġzebra")
    assert train_bpe(iter(texts), vocab_size=400).get_vocab() == bpe.get_vocab()
    smaller = train_bpe(texts, vocab_size=300)
    assert len(smaller) == 300
    assert len(smaller(texts[0])["input_ids"]) > len(bpe(texts[0])["input_ids"])


def test_bpe_must_hold_every_byte():
    assert len(train_bpe(["aa aa"], vocab_size=258)) == 258
    with pytest.raises(ConfigurationError, match="vocab_size: must be at least 258, got 257"):
        train_bpe(["aa aa"], vocab_size=257)


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_tokenizer_pads_left_and_survives_saving(kind, request, texts, tmp_path):
    tokenizer = request.getfixturevalue(kind)
    batch = tokenizer(["What a wonderful", "The cast"], padding=True)
    assert batch["attention_mask"][1][0] == 0
    assert batch["input_ids"][1][0] == tokenizer.pad_token_id
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.padding_side == "left"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert loaded(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    assert loaded.decode(loaded(texts[0])["input_ids"]) == texts[0]
