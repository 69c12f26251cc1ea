"""The task of the training steps: an untrained tiny GPT-2, prompts and pairs of equal length."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from lit_klrb.data.preferences import PreferencePair

VOCABULARY, LAYERS, WIDTH = 8192, 4, 256
PROMPTS, COMPLETIONS_PER_PROMPT, PROMPT_TOKENS, COMPLETION_TOKENS = 32, 2, 16, 48
PAIRS = 32
BETA, LEARNING_RATE, CLIP_RANGE = 0.05, 1e-5, 0.2

Shares = dict[str, float]


def build(folder: Path) -> None:
    """A folder with model and tokenizer, of whose V words only one ends a completion."""
    words = {f"w{index}": index for index in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2}
    words["<eos>"] = VOCABULARY - 1
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=4,
        n_positions=128,
        bos_token_id=VOCABULARY - 1,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=VOCABULARY - 2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def draw(count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(VOCABULARY - 2, (count, length), generator=generator).tolist()
    return ids


def pairs(count: int) -> list[PreferencePair]:
    """Random pairs; the reference's log-probabilities do not influence the time of a step."""
    parts = zip(
        draw(count, PROMPT_TOKENS, 1),
        draw(count, COMPLETION_TOKENS, 2),
        draw(count, COMPLETION_TOKENS, 3),
        strict=True,
    )
    return [PreferencePair(*part, -400.0, -400.0) for part in parts]


def words(ids: list[int]) -> str:
    """The text of token ids."""
    return " ".join(f"w{index}" for index in ids)


def length_reward(texts: list[str], **_: Any) -> list[float]:
    """A cheap reward of texts: the number of characters, in hundreds."""
    return [len(text) / 100 for text in texts]


def trl_length_reward(completions: list[str], **_: Any) -> list[float]:
    """The same with TRL's signature."""
    return length_reward(completions)
