"""Sampling of completions."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from lit_klrb.errors import ConfigurationError


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Top-k and top-p are not available, as they change the distribution the KL is about.

    Args:
        completions_per_prompt: Completions per prompt (K); leave-one-out needs at least 2.
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: Divides the logits of policy and reference, in sampling and in every KL.

    Raises:
        ConfigurationError: If a value is not positive.
    """

    completions_per_prompt: int = 2
    max_new_tokens: int = 48
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("completions_per_prompt", "max_new_tokens", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"must be positive and finite, got {getattr(self, name)}", key=name)


class Rollout(NamedTuple):
    """Prompts with their completions, prompt-major: the K completions of a prompt are adjacent rows.

    Args:
        tokens: Left-padded prompts followed by right-padded completions, shape [B, P+T].
        attention_mask: True on tokens other than padding, shape [B, P+T].
        mask: True on completion tokens, EOS included, shape [B, T].
    """

    tokens: Tensor
    attention_mask: Tensor
    mask: Tensor

    @property
    def completions(self) -> Tensor:
        """Token ids of the completions, shape [B, T]."""
        return self.tokens[:, -self.mask.shape[1] :]

    @property
    def position_ids(self) -> Tensor:
        """Positions that do not count padding, shape [B, P+T]."""
        return position_ids(self.attention_mask)

    def rows(self, rows: slice) -> "Rollout":
        """A slice of the sequences."""
        return Rollout(self.tokens[rows], self.attention_mask[rows], self.mask[rows])


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions counted from the first token that is not padding, so that left padding has no effect.

    Example:
        >>> position_ids(torch.tensor([[0, 0, 1, 1]])).tolist()
        [[0, 0, 0, 1]]
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def completion_mask(completions: Tensor, eos_token_id: int | None) -> Tensor:
    """True up to and including the first EOS; true everywhere without one.

    Args:
        completions: Token ids, shape [B, T].
        eos_token_id: The id that ends a completion; None if there is none.

    Example:
        >>> completion_mask(torch.tensor([[5, 0, 0], [5, 6, 7]]), eos_token_id=0).tolist()
        [[True, True, False], [True, True, True]]
    """
    if eos_token_id is None:
        return torch.ones_like(completions, dtype=torch.bool)
    ended = (completions == eos_token_id).cumsum(-1)
    return (ended == 0) | ((ended == 1) & (completions == eos_token_id))


@torch.no_grad()  # not inference_mode, whose tensors cannot be used in a loss afterwards
def generate_completions(
    policy: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    *,
    seed: int,
    eos_token_id: int | None,
    pad_token_id: int,
    rows_before: int = 0,
) -> Rollout:
    """Sample completions from the policy, without dropout and reproducibly.

    Token t of sequence n is the inverse distribution function at a uniform number that depends only on
    (seed, n, t). A batch can therefore be split, across processes for example, without changing its tokens.

    The model's generation settings, such as a repetition penalty, are ignored: with them the completions
    would not be samples from p.

    Args:
        policy: The model to sample from; its training mode is restored.
        prompts: Left-padded prompt ids, shape [P, N].
        prompt_mask: True on prompt tokens other than padding, shape [P, N].
        sampling: Number of completions, maximum length and temperature.
        seed: Seed of the samples, see `lit_klrb.seeding`.
        eos_token_id: The id that ends a completion; if None, all completions have `max_new_tokens` tokens.
        pad_token_id: Fills the positions after the end.
        rows_before: Number of sequences of the same batch that precede these and are sampled by other calls.

    Raises:
        ConfigurationError: If prompt and completion exceed the policy's context length.
    """
    positions = getattr(policy.config, "max_position_embeddings", None)
    if positions is not None and prompts.shape[1] + sampling.max_new_tokens > positions:
        raise ConfigurationError(
            f"{sampling.max_new_tokens} after a prompt of {prompts.shape[1]} tokens exceeds the "
            f"policy's context length, {positions}",
            key="max_new_tokens",
        )
    count = sampling.completions_per_prompt
    prompts, prompt_mask = prompts.repeat_interleave(count, 0), prompt_mask.repeat_interleave(count, 0)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    shape = rows_before + len(prompts), sampling.max_new_tokens
    uniforms = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    draw = InverseTransform(uniforms[rows_before:].to(prompts.device), sampling.temperature, prompts.shape[1])
    # Never compiled: shapes change with each token
    with _plain_generation(policy), torch.compiler.set_stance("force_eager"):
        tokens: Tensor = policy.generate(  # type: ignore[operator]
            prompts,
            attention_mask=prompt_mask.long(),
            generation_config=settings,
            logits_processor=LogitsProcessorList([draw]),
        )
    mask = completion_mask(tokens[:, prompts.shape[1] :], eos_token_id)
    return Rollout(tokens, torch.cat([prompt_mask.bool(), mask], 1), mask)


class InverseTransform(LogitsProcessor):
    """Inverse transform sampling: masks all tokens but the sampled one, so greedy decoding samples from p.

    Faster than `multinomial`, which on a CPU draws an exponential number for every token of the vocabulary.

    Args:
        uniforms: Uniform numbers in [0, 1), one per completion token, float64, shape [B, T].
        temperature: Divides the logits.
        prompt_tokens: Length of the prompts, padding included.

    Example:
        >>> uniforms = torch.tensor([[0.2], [0.8]], dtype=torch.float64)
        >>> logits = torch.tensor([[0.3, 0.0, 0.7]]).log().repeat(2, 1)
        >>> InverseTransform(uniforms, 1.0, prompt_tokens=4)(torch.zeros(2, 4), logits).argmax(1).tolist()
        [0, 2]
    """

    def __init__(self, uniforms: Tensor, temperature: float, prompt_tokens: int) -> None:
        self.uniforms, self.temperature, self.prompt_tokens = uniforms, temperature, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that are 0 for the sampled token and -inf for all others, shape [B, V]."""
        uniforms = self.uniforms[:, input_ids.shape[1] - self.prompt_tokens, None]
        cumulative = (scores.float() / self.temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
        # The first token whose cumulative probability exceeds the number, so never one of probability 0; the
        # number is scaled by the total, which is not exactly 1 because of rounding
        tokens = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
        tokens.clamp_(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout and the model's generation settings; both are restored, for each module separately."""
    modes = [(module, module.training) for module in model.modules()]
    settings = model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    yield
    model.generation_config = settings
    for module, was_training in modes:
        module.training = was_training
