"""Tokenizers built in code: words for the embedded review world, byte-level BPE for any other corpus."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_klrb.data.grammar import ReviewGrammar

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def grammar_tokenizer() -> PreTrainedTokenizerFast:
    """The word-level tokenizer of the embedded review world.

    Ids 0, 1 and 2 are padding, end of sequence and unknown; the vocabulary follows in alphabetical order, so
    that a word has the same id in every world. Words carry the space before them, punctuation marks carry
    none: decoding gives back the very text.

    Example:
        >>> tokenizer = grammar_tokenizer()
        >>> tokenizer.decode(tokenizer("Do not miss it!")["input_ids"])
        'Do not miss it!'
    """
    words = [word if not word.isalnum() else f"▁{word}" for word in ReviewGrammar().vocabulary]
    ids = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, pad_token=PAD, eos_token=EOS, padding_side="left"
    )
