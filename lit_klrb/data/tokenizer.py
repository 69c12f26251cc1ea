"""Tokenizers: word-level for the embedded review world, byte-level BPE for other corpora."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.errors import ConfigurationError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def grammar_tokenizer() -> PreTrainedTokenizerFast:
    """The word-level tokenizer of the embedded review world.

    Ids 0, 1 and 2 are padding, end of sequence and unknown; the vocabulary follows in alphabetical order. A
    word has the same id for all seeds of the world. Decoding reproduces the text of a review exactly.

    Example:
        >>> tokenizer = grammar_tokenizer()
        >>> tokenizer.decode(tokenizer("Do not miss it!")["input_ids"])
        'Do not miss it!'
    """
    ids = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *ReviewGrammar().vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, pad_token=PAD, eos_token=EOS, padding_side="left"
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on a corpus.

    Ids 0 and 1 are padding and end of sequence. Every text can be encoded, and decoding reproduces it.

    Args:
        texts: The corpus.
        vocab_size: Maximum size of the vocabulary: the 256 bytes and the two special tokens, then merges by
            frequency, as long as a pair occurs at least twice.

    Example:
        >>> tokenizer = train_bpe(["It was good.", "It was bad."], vocab_size=262)
        >>> tokenizer.tokenize("It was")
        ['It', 'Ġwas']
    """
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + len((PAD, EOS))
    if vocab_size < smallest:
        raise ConfigurationError(f"must be at least {smallest}, got {vocab_size}", key="vocab_size")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left"
    )
