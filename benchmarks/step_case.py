"""The tasks of the training steps: an untrained tiny GPT-2, and SmolLM2-135M-Instruct."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from lit_klrb.data.prompts import PreferencePair, collate_pairs

from .measure import DEVICE

VOCABULARY, LAYERS, WIDTH = 8192, 4, 256
PROMPTS, PROMPT_TOKENS, COMPLETION_TOKENS = 32, 16, 48
BETA, LEARNING_RATE, CLIP_RANGE = 0.05, 1e-5, 0.2
# Where `make chat` imports the model to.
SMOLLM2 = Path("runs/models/smollm2")
BEGINNINGS = (
    "I went to see this movie last night and",
    "The actors in this film are so well chosen that",
    "My brother had told me about the ending, but",
    "After the first ten minutes of the story we",
    "What surprised me most about the music was that",
    "Nobody who has read the book will believe how",
    "The director, whose earlier work I had liked,",
    "In the second half, when the family returns home,",
)

Shares = dict[str, float]


class Task(NamedTuple):
    """A model and prompts, each of which gets K completions of T tokens.

    Args:
        folder: Model and tokenizer.
        prompts: Texts of the prompts.
        completions_per_prompt: K.
        completion_tokens: T.
        precision: Lightning's name of the precision.
        lora: Arguments of `peft.LoraConfig`; None to train all weights.
        spread: How far the numbers of words of given answers are from T, at most.
    """

    folder: Path
    prompts: Sequence[str]
    completions_per_prompt: int
    completion_tokens: int
    precision: str = "32-true"
    lora: dict[str, Any] | None = None
    spread: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """In which products are computed."""
        return torch.bfloat16 if "bf16" in self.precision else torch.float32

    @property
    def sequences(self) -> int:
        """Number of completions."""
        return len(self.prompts) * self.completions_per_prompt

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return self.sequences * self.completion_tokens

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's, which pads on the left."""
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        return tokenizer

    def batch(self) -> dict[str, torch.Tensor]:
        """The prompts' tokens, left-padded."""
        encoded = self.tokenizer([*self.prompts], return_tensors="pt", padding=True)
        return {"tokens": encoded["input_ids"], "attention_mask": encoded["attention_mask"].bool()}

    def pairs(self) -> list[tuple[str, str, str]]:
        """Prompts with two answers each, as many answers as there are completions."""
        drawn, pool = random.Random(0), " ".join(self.prompts).split()

        def answer() -> str:
            words = self.completion_tokens + drawn.randint(-self.spread, self.spread)
            return " " + " ".join(drawn.choices(pool, k=words))

        prompts = itertools.islice(itertools.cycle(self.prompts), self.sequences // 2)
        return [(prompt, answer(), answer()) for prompt in prompts]

    def pair_batch(self) -> dict[str, torch.Tensor]:
        """The same as a batch of DPO, with any log-probabilities under the reference."""
        tokenizer = self.tokenizer

        def ids(text: str, end: int) -> list[int]:
            encoded: list[int] = tokenizer(text)["input_ids"]
            return encoded + [tokenizer.eos_token_id] * end

        pairs = [
            PreferencePair(ids(prompt, 0), ids(chosen, 1), ids(rejected, 1), -400.0, -400.0)
            for prompt, chosen, rejected in self.pairs()
        ]
        return collate_pairs(pairs, tokenizer.pad_token_id)

    def operations(self, inner_epochs: int) -> float:
        """Floating-point operations of the products with weights in one cycle; attention is not counted.

        A pass reads each prompt and each completion once. There are one to sample, one of the reference and,
        per inner step, one of the policy with the gradients of inputs and, without an adapter, of weights.
        """
        read = int(self.batch()["attention_mask"].sum()) + self.tokens
        return self._operations(2 + inner_epochs * (3 if self.lora is None else 2), read, self.tokens)

    def pair_operations(self, whole: bool) -> float:
        """The same of a step on pairs, without a reference.

        Args:
            whole: Whether the tokens of prompts are trained on too; if not, each prompt is read once.
        """
        pairs = self.pair_batch()
        read, tokens = int(pairs["attention_mask"].sum()), int(pairs["mask"].sum())
        return self._operations(3, read, read) if whole else self._operations(3, (read + tokens) // 2, tokens)

    def _operations(self, passes: int, read: int, predicted: int) -> float:
        model = AutoModelForCausalLM.from_pretrained(self.folder)
        head = model.get_output_embeddings().weight.numel()
        blocks = sum(w.numel() for w in model.base_model.parameters() if w.ndim == 2)
        blocks -= model.get_input_embeddings().weight.numel()
        return 2.0 * passes * (blocks * read + head * predicted)


def tiny(folder: Path) -> Task:
    """An untrained tiny GPT-2, which is written to the folder, with random prompts."""
    build(folder)
    return Task(folder, [words(ids) for ids in draw(PROMPTS, PROMPT_TOKENS, 1)], 2, COMPLETION_TOKENS)


def smollm2(precision: str, lora: dict[str, Any] | None = None) -> Task:
    """SmolLM2-135M-Instruct with eight beginnings of reviews, four completions of 24 tokens each.

    On a GPU with 64 beginnings and 64 tokens.
    """
    times, tokens = (1, 24) if DEVICE.type == "cpu" else (8, 64)
    return Task(SMOLLM2.absolute(), BEGINNINGS * times, 4, tokens, precision, lora, spread=tokens // 2)


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Write a tokenizer of V words, of which only one ends a completion."""
    words = {f"w{index}": index for index in range(vocabulary)}
    for name, index in (("pad", VOCABULARY - 2), ("eos", VOCABULARY - 1)):
        del words[f"w{index}"]
        words[f"<{name}>"] = index
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)


def build(folder: Path) -> None:
    """A folder with model and tokenizer."""
    write_tokenizer(folder)
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


def words(ids: list[int]) -> str:
    """The text of token ids."""
    return " ".join(f"w{index}" for index in ids)


def length_reward(texts: list[str], **_: Any) -> list[float]:
    """A cheap reward of texts: the number of characters, in hundreds."""
    return [len(text) / 100 for text in texts]


def trl_length_reward(completions: list[str], **_: Any) -> list[float]:
    """The same with TRL's signature."""
    return length_reward(completions)
