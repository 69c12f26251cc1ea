"""Sampling of completions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from lit_klrb.data.lengths import check_context_length
from lit_klrb.engine.decoding import make_decoder
from lit_klrb.engine.packed_weights import packed_weights
from lit_klrb.errors import ConfigurationError, check_positive
from lit_klrb.functional.credit import running_sum
from lit_klrb.models.capabilities import eval_mode
from lit_klrb.models.precision import fast_autocast
from lit_klrb.models.rollout import Rollout, completion_mask, is_end
from lit_klrb.models.sharding import agreed, is_sharded

# Tokens per block of the vocabulary in sampling.
_BLOCK = 64
# The largest fraction of a distribution's mass: 1 after rounding would select no token.
_LAST = 1 - 2.0**-40

# Settings of transformers with which completions would not be samples of the model, and without effect.
NEUTRAL = dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), 1) | dict.fromkeys(
    ("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), 0
)
# The range of temperatures: from its inverse to this.
HOTTEST = 1000.0


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Top-k and top-p are not available, as they change the distribution the KL is about.

    Args:
        completions_per_prompt: Completions per prompt (K); leave-one-out needs at least 2.
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: Divides the logits of policy and reference, in sampling and in every KL.
    """

    completions_per_prompt: int = 2
    max_new_tokens: int = 48
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_positive(
            completions_per_prompt=self.completions_per_prompt,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
        )
        if not HOTTEST >= self.temperature >= 1 / HOTTEST:
            problem = f"must be from {1 / HOTTEST:g} to {HOTTEST:g}, got {self.temperature}"
            why = "logits divided by it would overflow, or all be equal"
            raise ConfigurationError(f"{problem}: {why}", key="temperature")


def sampling_settings(model: PreTrainedModel) -> str:
    """What a model's `generation_config` asks of samples, such as "temperature 0.6, top_k 20", or ""."""
    values = {name: getattr(model.generation_config, name, None) for name in NEUTRAL}
    return ", ".join(f"{k} {v:g}" for k, v in values.items() if v is not None and v != NEUTRAL[k])


def generate_completions(
    policy: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    *,
    seed: int,
    ends: Sequence[int],
    pad_token_id: int,
    rows_before: int = 0,
    rows: int | None = None,
) -> Rollout:
    """Sample completions from the policy, without dropout and reproducibly.

    Token t of sequence n is the inverse distribution function at a uniform number that depends only on
    (seed, n, t). A batch can therefore be split, across processes for example, without changing its tokens.

    The model's generation settings, such as a repetition penalty, are not used: with them the completions
    would not be samples from p. Each prompt is processed once, for all of its completions, unless the policy
    keeps states that its cache does not hold: it then reads whole sequences for each token.

    Args:
        policy: The model to sample from; its training mode is restored.
        prompts: Left-padded prompt ids, shape [P, N].
        prompt_mask: True on prompt tokens other than padding, shape [P, N].
        sampling: Number of completions, maximum length and temperature.
        seed: Seed of the samples, see `lit_klrb.seeding`.
        ends: The ids that end a completion; if empty, all completions have `max_new_tokens` tokens.
        pad_token_id: Fills the positions after the end.
        rows_before: Number of sequences of the same batch that precede these and are sampled by other calls.
        rows: Draw from the first rows of the head only; None for all.
    """
    new, count = sampling.max_new_tokens, sampling.completions_per_prompt
    request = f"{new} after a prompt of {prompts.shape[1]} tokens"
    check_context_length(policy, prompts.shape[1] + new, "the policy", key="max_new_tokens", sequence=request)
    shape = rows_before + count * len(prompts), sampling.max_new_tokens
    uniforms = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    uniforms = uniforms[rows_before:].to(prompts.device)
    # Inference mode is quicker, but keeps no casts of weights for autocast, and FSDP trains what it gathers
    plain = is_sharded(policy) or torch.is_autocast_enabled(policy.device.type)
    mode = torch.no_grad if plain else torch.inference_mode
    # Never compiled, as shapes change with each token; without gradients first, which fast_autocast looks at
    packed = packed_weights(policy, len(uniforms), new)
    with mode(), eval_mode(policy), fast_autocast(policy), packed, torch.compiler.set_stance("force_eager"):
        completions = _decode(policy, prompts, prompt_mask, uniforms, sampling, ends, pad_token_id, rows)
    prompts, prompt_mask = prompts.repeat_interleave(count, 0), prompt_mask.repeat_interleave(count, 0)
    mask = completion_mask(completions, ends)
    return Rollout(torch.cat([prompts, completions], 1), torch.cat([prompt_mask.bool(), mask], 1), mask)


def _decode(
    policy: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    ends: Sequence[int],
    pad_token_id: int,
    vocabulary: int | None = None,
) -> Tensor:
    """The tokens that uniform numbers select, shape [B, T]; shorter than T if all completions have ended.

    Completions that have ended leave the batch once they are half of it.
    """
    sequences = make_decoder(policy, prompts, prompt_mask, uniforms.shape[1] - 1)
    rows = torch.arange(len(prompts), device=prompts.device)
    rows = rows.repeat_interleave(len(uniforms) // len(prompts))
    completions = torch.full(uniforms.shape, pad_token_id, device=prompts.device)
    # The completions in the batch, and which of them have ended
    batch, ended = torch.arange(len(rows), device=rows.device), torch.zeros_like(rows, dtype=torch.bool)
    for step, column in enumerate(uniforms.unbind(1)):
        logits = sequences.logits()[:, :vocabulary]
        if step == 0:  # all completions of a prompt continue from its states
            logits = logits[rows]
            sequences.keep(rows)
        probabilities = logits.float().div_(sampling.temperature).softmax(-1)
        tokens = inverse_transform(probabilities, column[batch])
        completions[batch, step] = tokens.masked_fill_(ended, pad_token_id)
        sequences.append(tokens)
        if ends:
            ended |= is_end(tokens, ends)
            if agreed(policy, ended.all()):
                return completions[:, : step + 1]
            left = (~ended).nonzero()[:, 0]
            # Where all have ended, they go on for as long as another process needs this one's blocks
            if 0 < 2 * len(left) <= len(ended):
                batch, ended = batch[left], ended[left]
                sequences.keep(left)
    return completions


def inverse_transform(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens by inverse transform sampling, shape [B].

    Faster than `multinomial`, which on a CPU draws an exponential number for every token of the vocabulary,
    and than a float64 cumulative sum over the vocabulary: the search is first for a block of tokens, then
    within it.

    Args:
        probabilities: Probabilities of the tokens, shape [B, V]; they need not sum to 1. A token of
            probability 0 is never drawn.
        uniforms: Uniform numbers in [0, 1), float64, shape [B].

    Example:
        >>> uniforms = torch.tensor([0.2, 0.8], dtype=torch.float64)
        >>> inverse_transform(torch.tensor([[0.4, 0.0, 0.6]]).repeat(2, 1), uniforms).tolist()
        [0, 2]
    """
    blocks = pad(probabilities, (0, -probabilities.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    block, fraction = _search(blocks.sum(-1), uniforms)
    token, _ = _search(blocks[torch.arange(len(block), device=block.device), block], fraction)
    return block * _BLOCK + token


def _search(masses: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor]:
    """The first index at which the cumulative sum exceeds a fraction of the total, shape [B].

    Also returns the fraction of the mass at that index which precedes the place.
    """
    cumulative = running_sum(masses.double())
    target = fractions.clamp(0, _LAST)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=masses.shape[1] - 1)
    mass = masses.gather(1, index)
    fraction = (target - cumulative.gather(1, index) + mass) / mass
    return index[:, 0], fraction[:, 0]
