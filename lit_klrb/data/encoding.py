"""Token ids of texts that a language model reads or writes: what begins a text, and what ends a completion.

Every prompt and every text of a language model is encoded here, so that training, evaluation and comparison
read the same tokens.
"""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of texts, after those that the tokenizer puts before a text, such as a BOS.

    What it puts after a text, such as an EOS, is left out. A text that begins with the former gets no second
    one.

    Args:
        tokenizer: A language model's.
        texts: The texts.
        special_tokens: False for completions and for what a chat template made, which has its special tokens.

    Example:
        >>> from lit_klrb.data.tokenizer import grammar_tokenizer
        >>> tokenizer = grammar_tokenizer()
        >>> tokenizer.decode(encode(tokenizer, ["Do not miss it!"])[0])
        'Do not miss it!'
    """
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    before = beginning(tokenizer) if special_tokens else []
    return [ids if ids[: len(before)] == before else [*before, *ids] for ids in rows]


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of the special tokens that a tokenizer puts before a text; most have none, or a BOS."""
    (text,) = tokenizer(["a"], add_special_tokens=False)["input_ids"]
    (whole,) = tokenizer(["a"])["input_ids"]
    starts = range(len(whole) - len(text) + 1)
    start = next((n for n in starts if whole[n : n + len(text)] == text), 0)
    return list(whole[:start])


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """The ids of the tokens that end a completion, the tokenizer's EOS first.

    The others are those of the model's generation settings: chat models have one for the end of a turn and
    one for the end of a text.

    Args:
        tokenizer: The model's.
        model: A language model.
    """
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(own if isinstance(own, (list, tuple)) else [own])]
    return tuple(dict.fromkeys(index for index in ids if index is not None))


def ended(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> list[int]:
    """The ids of a text up to the token that ends it; it gets the tokenizer's EOS if there is none.

    Args:
        ids: A text or a completion. A chat template may put white space after its end.
        tokenizer: The model's.
        ends: The tokens that can end it, see `end_tokens`.
    """
    last = max((place for place, index in enumerate(ids) if index in ends), default=None)
    if last is None or str(tokenizer.decode(list(ids[last + 1 :]))).strip():
        return [*ids, tokenizer.eos_token_id]
    return list(ids[: last + 1])
