"""Studies of pairs of a policy and a reference, such as checkpoints, without a training run."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, final

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from typing_extensions import override

from lit_klrb import schema
from lit_klrb.data.batches import Batch
from lit_klrb.data.corpora import Source, load_rows
from lit_klrb.data.prompts import prompt_batch, read_prompts
from lit_klrb.data.reader import Reader
from lit_klrb.distributed import stacked, stacked_stats
from lit_klrb.engine.generation import Sampling
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.functional import TokenStats, TopK
from lit_klrb.models.folders import check_device
from lit_klrb.models.loading import ITSELF, freeze
from lit_klrb.reward_functions import TrainerState
from lit_klrb.rewards import Reward, RewardOutput, TrainingReward, load_reward
from lit_klrb.rollouts.pair import Loaded, Pair
from lit_klrb.rollouts.scoring import completion_logprobs
from lit_klrb.studies.estimation import PROMPTS_PER_PASS
from replication.studies.base import Study

# Statistics of the head of a `TopK`.
HEAD = ("head_kl", "head_mass", "ref_head_mass", "in_head", "head_forward_kl")


class Sample(NamedTuple):
    """Completions of a policy with their statistics, prompt-major.

    Args:
        stats: Under policy and reference, fields [P * K, T].
        mask: True on completion tokens, shape [P * K, T].
        tokens: Token ids, shape [P * K, T].
        seconds: Time of `sampling`, of the log-probabilities of the sampled tokens (`logprobs`) and of all
            statistics, with the KL of every token over the vocabulary (`statistics`), or for a head alone
            (`topk`).
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
    def sample(self, prompts: int, completions: int, seed: int, topk: TopK | None = None) -> Sample:
        """Sample completions.

        Args:
            prompts: Number of prompts (P); the same prompts for every seed.
            completions: Completions per prompt (K).
            seed: Seed of the completions.
            topk: The head for which the statistics have sums, too.
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
        self.sampling(2)  # checks the settings

    @property
    @override
    def label(self) -> str:
        return self.policy_path

    def sampling(self, completions: int) -> Sampling:
        """How completions are sampled, so many per prompt."""
        return Sampling(completions, self.max_new_tokens, self.temperature)

    def load(self) -> Pair:
        """The models, in evaluation mode."""
        check_device(self.device)
        policy, reference = Loaded.of("policy_path", self.policy_path), None
        if self.reference_path not in (None, ITSELF):
            reference = Loaded.of("reference_path", str(self.reference_path))
            freeze(reference.model.to(self.device))  # type: ignore[arg-type]
        policy.model.to(self.device).eval()  # type: ignore[arg-type]
        itself, ends = self.reference_path == ITSELF, self.stop_at_eos
        return Pair(policy, reference, temperature=self.temperature, itself=itself, stop_at_eos=ends)

    def load_reward(self) -> Reward:
        """The reward, which only gradients need."""
        device = torch.device(self.device)
        reward = load_reward(self.reward_path, self.reward_label, self.reward_output, device)
        return TrainingReward(reward, lambda: (TrainerState(0, 0), False))

    def batches(self, pair: Pair, number: int, size: int) -> list[Batch]:
        """Batches of distinct prompts, the same for every seed, on the device of the pair."""
        rows = load_rows(Source(self.source, "prompts"), self.split, size=number * size)
        if len(rows) < number * size:
            has = f"the {self.split} split of {self.source} has {len(rows)} rows"
            raise ConfigurationError(f"{has}, {number * size} needed", key="source")
        reader = Reader("source", pair.tokenizer, ())
        prompts = read_prompts(rows, reader, self.min_prompt_tokens, self.max_prompt_tokens)
        parts = (prompts[first : first + size] for first in range(0, number * size, size))
        padding, device = pair.tokenizer.pad_token_id, pair.policy.device
        return [move_data_to_device(prompt_batch(part, padding), device) for part in parts]

    @override
    def sample(self, prompts: int, completions: int, seed: int, topk: TopK | None = None) -> Sample:
        pair = self.load()
        (batch,) = self.batches(pair, 1, prompts)
        return sample_completions(pair, batch, self.sampling(completions), seed, topk, with_logprobs=True)

    @override
    def exact_kl(self, prompts: int) -> None:
        return None


@torch.no_grad()
def sample_completions(
    pair: Pair,
    batch: Batch,
    sampling: Sampling,
    seed: int,
    topk: TopK | None = None,
    *,
    with_logprobs: bool = False,
) -> Sample:
    """Completions of a batch of prompts with their statistics, a few prompts at a time.

    Sums over a head are computed in a pass of their own; `with_logprobs` those of the sampled tokens alone,
    for their time.
    """
    rollouts, parts, seconds = [], [], dict[str, float]()
    for first in range(0, len(batch["tokens"]), PROMPTS_PER_PASS):
        rows, before = slice(first, first + PROMPTS_PER_PASS), first * sampling.completions_per_prompt
        some = {name: value[rows] for name, value in batch.items() if isinstance(value, Tensor)}
        with timed(seconds, "sampling"):
            rollout = pair.sample(some, sampling, seed=seed, rows_before=before)
        if with_logprobs:
            with timed(seconds, "logprobs"), pair.reading_reference() as reference:
                for model in (pair.policy, reference):
                    completion_logprobs(model, rollout, pair.temperature)
        with timed(seconds, "statistics"):
            stats = pair.score(rollout, some)[1]
        if topk is not None:
            with timed(seconds, "topk"):
                head = pair.score(rollout, some, topk=topk)[1]
            stats = stats._replace(**{name: getattr(head, name) for name in HEAD})
        parts.append(stats)
        rollouts.append(rollout)
    mask = stacked([rollout.mask for rollout in rollouts]).cpu()
    tokens = stacked([rollout.completions for rollout in rollouts]).cpu()
    return Sample(stacked_stats(parts).map(Tensor.cpu), mask, tokens, seconds)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time of the block to that of a stage."""
    start = now()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + now() - start


def now() -> float:
    """The time in seconds, after waiting for pending work on a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


Measured = TypeVar("Measured", bound=ModelPair)


@dataclass(frozen=True, kw_only=True)
class PairStudy(Study, ABC, Generic[Measured]):
    """A study of pairs of models, each a part of the study and a snapshot in its artifact.

    Args:
        pairs: Different pairs.
    """

    pairs: Sequence[Measured]

    def __post_init__(self) -> None:
        labels = [pair.label for pair in self.pairs]
        if not labels or len(set(labels)) < len(labels):
            raise ConfigurationError(f"must be different pairs of models, got {labels}", key="pairs")

    @property
    @abstractmethod
    def design(self) -> dict[str, Any]:
        """Settings that all snapshots share, for the artifact."""

    @abstractmethod
    def snapshot(self, pair: Measured, seed: int) -> dict[str, Any]:
        """Measure a pair and return the content of its snapshot."""

    def parts(self, seed: int) -> Mapping[str, Callable[[], Any]]:
        """One part per pair."""
        return {pair.label: partial(self.snapshot, pair, seed) for pair in self.pairs}

    def artifact(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The design, and a snapshot for each pair."""
        snapshots = [{"step": step, "label": name, **parts[name]} for step, name in enumerate(parts)]
        return {"schema": schema.STUDY_SCHEMA, **self.design, "snapshots": snapshots}
