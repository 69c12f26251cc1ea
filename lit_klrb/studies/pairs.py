"""Pairs of a policy and a reference that the command `study` measures."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from typing_extensions import override

from lit_klrb.data.batches import Batch
from lit_klrb.data.corpora import load_reviews
from lit_klrb.data.prompts import COLUMNS, prompt_batch, read_prompts
from lit_klrb.distributed import stacked, stacked_stats
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.functional import TokenStats
from lit_klrb.models.limits import check_device
from lit_klrb.models.scoring import completion_logprobs
from lit_klrb.modules.rloo import RLOOModule
from lit_klrb.modules.stopwatch import Stopwatch
from lit_klrb.rewards import RewardOutput

# Prompts per forward pass of a checkpoint.
_PROMPTS_PER_PASS = 4


class Sample(NamedTuple):
    """Completions of a policy with their statistics, prompt-major.

    Args:
        stats: Under policy and reference, fields [P * K, T].
        mask: True on completion tokens, shape [P * K, T].
        tokens: Token ids, shape [P * K, T].
        seconds: Time of `sampling`, of the log-probabilities of the sampled tokens (`logprobs`) and of all
            statistics, with the KL of every token over the vocabulary (`statistics`).
    """

    stats: TokenStats
    mask: Tensor
    tokens: Tensor
    seconds: dict[str, float]


class ModelPair(ABC):
    """A policy and a reference, and prompts for them."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Its name in the artifact."""

    @abstractmethod
    def sample(self, prompts: int, completions: int, seed: int, *, stratum: int = 1) -> Sample:
        """Sample completions.

        Args:
            prompts: Number of prompts (P); the same prompts for every seed.
            completions: Completions per prompt (K).
            seed: Seed of the completions.
            stratum: Number of successive completions that share one random shift, see `Sampling`; 1 for
                independent completions.
        """

    @abstractmethod
    def exact_kl(self, prompts: int) -> Tensor | None:
        """The KL of each prompt in nats per completion, shape [P]; None if the models are not enumerable."""


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointPair(ModelPair):
    """A policy and a reference from checkpoints, exported folders or a hub.

    Args:
        policy_path: The policy: a hub id, a folder, a .gguf file or a checkpoint.
        reference_path: The reference; None for the policy with its adapter disabled.
        reward_path: The reward, see `RLOOModule`; only gradients need it.
        reward_label: See `RLOOModule`.
        reward_output: See `RLOOModule`.
        temperature: Divides the logits of both models.
        max_new_tokens: Maximum number of tokens of a completion.
        stop_at_eos: Whether the end-of-sequence token ends a completion.
        source: Prompts as of `PromptDataModule`: "grammar", a hub id, a folder, or a .parquet or .jsonl file.
            The reward gets their other columns.
        split: Their split.
        min_prompt_tokens: Minimum length of a prompt.
        max_prompt_tokens: Maximum length of a prompt.
        device: Where the models are, such as cpu or cuda.
    """

    policy_path: str
    reference_path: str | None = None
    reward_path: str | dict[str, float] = "grammar"
    reward_label: str | dict[str, str] | None = None
    reward_output: RewardOutput = "log_odds"
    temperature: float = 1.0
    max_new_tokens: int = 48
    stop_at_eos: bool = True
    source: str = "grammar"
    split: str = "validation"
    min_prompt_tokens: int = 2
    max_prompt_tokens: int = 8
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_at_least(1, min_prompt_tokens=self.min_prompt_tokens)
        check_at_least(self.min_prompt_tokens, max_prompt_tokens=self.max_prompt_tokens)
        self.module(completions=2)  # checks the settings

    @property
    @override
    def label(self) -> str:
        return self.policy_path

    def module(self, completions: int) -> RLOOModule:
        """A module with these settings, whose models are not loaded.

        Args:
            completions: Completions per prompt.
        """
        return RLOOModule(
            policy_path=self.policy_path,
            reference_path=self.reference_path,
            reward_path=self.reward_path,
            reward_label=self.reward_label,
            reward_output=self.reward_output,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            stop_at_eos=self.stop_at_eos,
            completions_per_prompt=completions,
        )

    def load(self, completions: int) -> RLOOModule:
        """A module with its models, in evaluation mode.

        Raises:
            ConfigurationError: If a model cannot be loaded or the device does not exist.
        """
        check_device(self.device)
        module = self.module(completions)
        module.load_models(torch.device(self.device))
        return module.eval()

    def batches(self, module: RLOOModule, number: int, size: int) -> list[Batch]:
        """Batches of distinct prompts, the same for every seed.

        Args:
            module: Provides tokenizer and device.
            number: Number of batches.
            size: Prompts per batch.

        Raises:
            ConfigurationError: If the source has fewer reviews.
        """
        reviews = load_reviews(self.source, self.split, size=number * size, columns=COLUMNS)
        if len(reviews) < number * size:
            raise ConfigurationError(
                f"the {self.split} split of {self.source} has {len(reviews)} reviews, {number * size} needed",
                key="source",
            )
        prompts = read_prompts(reviews, module.tokenizer, self.min_prompt_tokens, self.max_prompt_tokens)
        padded = (
            prompt_batch(prompts[first : first + size], module.tokenizer.pad_token_id)
            for first in range(0, number * size, size)
        )
        return [move_data_to_device(batch, module.device) for batch in padded]

    @override
    @torch.no_grad()
    def sample(self, prompts: int, completions: int, seed: int, *, stratum: int = 1) -> Sample:
        module, watch = self.load(completions=2), Stopwatch(running=True)
        strata = 1 if stratum == 1 else completions // stratum
        per_row = completions // strata
        sampling = replace(module.sampling, completions_per_prompt=per_row, stratified=stratum > 1)
        (batch,) = self.batches(module, 1, prompts)
        rollouts, parts = [], []
        for first in range(0, prompts, _PROMPTS_PER_PASS):
            some = {
                name: value[first : first + _PROMPTS_PER_PASS].repeat_interleave(strata, 0)
                for name, value in batch.items()
                if isinstance(value, Tensor)
            }
            before = first * completions
            with watch("sampling"):
                rollout = module.generate(module.policy, some, sampling, seed=seed, rows_before=before)
            with watch("logprobs"), module.reading_reference() as reference:
                for model in (module.policy, reference):
                    completion_logprobs(model, rollout, self.temperature)
            with watch("statistics"):
                parts.append(module.score(rollout, some)[1])
            rollouts.append(rollout)
        mask, tokens = (
            stacked([getattr(rollout, name) for rollout in rollouts]).cpu()
            for name in ("mask", "completions")
        )
        return Sample(stacked_stats(parts).map(lambda field: field.cpu()), mask, tokens, watch.take())

    @override
    def exact_kl(self, prompts: int) -> None:
        return None
