"""One or several policies against a reference, on prompts or on given texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lit_klrb.comparison.estimates import TokenTable
from lit_klrb.comparison.inputs import encode_prompts, encode_windows, read_table
from lit_klrb.comparison.measure import (
    Advance,
    Loaded,
    check_tokenizers,
    load,
    noise_floor,
    sampled_rollouts,
    text_rollouts,
    token_table,
)
from lit_klrb.comparison.summary import Candidate
from lit_klrb.data.batches import pad
from lit_klrb.data.corpora import TEACHER_PROMPT
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.models.generation import Rollout, Sampling

# Starts a progress bar with a description and a number of rows.
Track = Callable[[str, int], Advance]


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """The models, the prompts or texts, and how they are measured.

    Policies are loaded one after the other: two models are in memory, and a third during the noise floor.

    Args:
        policies: Hub ids, folders or checkpoints.
        reference: The same.
        prompts: A file of prompts; give either this or texts.
        texts: A file of texts.
        directions: "forward", "reverse" or both.
        sampling: Completions per prompt, maximum length, temperature.
        max_tokens: Tokens per window of a text.
        system: A system prompt for the chat template.
        teacher_system: The reference's own system prompt, in place of any other; prompts only. In the column
            teacher_prompt of their file each may have what the reference reads instead.
        limit: Number of prompts or texts; 0 for all.
        batch_size: Prompts or windows per forward pass.
        seed: Seed of the completions.
        device: Where the models run.

    Raises:
        ConfigurationError: If a policy is given twice.
    """

    policies: Sequence[str]
    reference: str
    prompts: str | None = None
    texts: str | None = None
    directions: Sequence[str] = ("forward", "reverse")
    sampling: Sampling
    max_tokens: int = 512
    system: str | None = None
    teacher_system: str | None = None
    limit: int = 0
    batch_size: int = 8
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if len(set(self.policies)) < len(self.policies):
            raise ConfigurationError(f"{', '.join(self.policies)} must differ", key="policy")
        if self.prompts is None:
            check_at_least(2, max_tokens=self.max_tokens)
        if self.prompts is None and self.teacher_system is not None:
            raise ConfigurationError("needs prompts: texts have no system prompt", key="teacher_system")

    def run(self, track: Track) -> list[Candidate]:
        """Measure all policies.

        Args:
            track: Starts a progress bar.

        Raises:
            ConfigurationError: If a model or a file cannot be used.
        """
        key, source = ("prompts", self.prompts) if self.prompts is not None else ("texts", self.texts)
        table = read_table(key, str(source), key.removesuffix("s"), self.limit)
        reference = load("reference", self.reference, self.device)
        shared: list[Rollout] = []  # the reference's completions, the same for all policies
        return [self._candidate(path, reference, table, shared, track) for path in self.policies]

    def _candidate(
        self,
        path: str,
        reference: Loaded,
        given: dict[str, list[Any]],
        shared: list[Rollout],
        track: Track,
    ) -> Candidate:
        policy = load("policy", path, self.device)
        notes, unfinished = check_tokenizers("reference", policy, reference), None
        if self.prompts is None:
            length = min(self.max_tokens, _positions(policy) or self.max_tokens)
            windows, numbers = encode_windows("texts", given["text"], policy.tokenizer, length)
            rollouts = text_rollouts(windows, policy.tokenizer.pad_token_id, self.batch_size)
            by_direction, others = dict.fromkeys(self.directions, rollouts), {}
            cluster = torch.tensor(numbers)
        else:
            prompts = encode_prompts(
                "prompts",
                given["prompt"],
                policy.tokenizer,
                self.system,
                given.get(TEACHER_PROMPT, ()),
                self.teacher_system,
            )
            own = [prompt.tokens for prompt in prompts]
            theirs = [prompt.tokens if prompt.teacher is None else prompt.teacher for prompt in prompts]
            others = {} if own == theirs else {"forward": theirs, "reverse": own}
            rollouts = self._completions(policy, own, track)
            if "reverse" in self.directions and not shared:
                shared += self._completions(reference, theirs, track)
            cut = torch.cat([rollout.unfinished(policy.ends) for rollout in rollouts])
            unfinished = cut.double().mean().item()
            by_direction = {"forward": rollouts, "reverse": shared}
            cluster = torch.arange(len(prompts)).repeat_interleave(self.sampling.completions_per_prompt)
        tables = {}
        for direction in self.directions:
            pair = (policy, reference) if direction == "forward" else (reference, policy)
            advance = track(f"{direction} KL of {path}", len(cluster))
            tables[direction] = self._table(
                *pair, by_direction[direction], others.get(direction), cluster, advance
            )
        floor = noise_floor(policy.model, rollouts[0], self.sampling.temperature)
        return Candidate(path, notes, tables, floor, unfinished, bool(others))

    def _completions(self, loaded: Loaded, prompts: list[list[int]], track: Track) -> list[Rollout]:
        advance = track(f"completions of {loaded.path}", len(prompts))
        settings = {"seed": self.seed, "batch_size": self.batch_size}
        return sampled_rollouts(loaded, prompts, self.sampling, **settings, advance=advance)

    def _table(
        self,
        first: Loaded,
        second: Loaded,
        rollouts: list[Rollout],
        prompts: list[list[int]] | None,
        cluster: torch.Tensor,
        advance: Advance,
    ) -> TokenTable:
        """The statistics of KL(first‖second), the second of which reads other prompts if they are given."""
        count, read, rest = self.sampling.completions_per_prompt, rollouts, prompts
        if rest is not None:
            read = []
            for rollout in rollouts:
                some, rest = rest[: len(rollout.mask) // count], rest[len(rollout.mask) // count :]
                batch = pad(some, second.tokenizer.pad_token_id, side="left")
                read.append(rollout.after(batch["tokens"], batch["attention_mask"]))
        longest = max(int(rollout.attention_mask.sum(1).max()) for rollout in read)
        positions = _positions(second)
        if positions is not None and longest > positions:
            raise ConfigurationError(
                f"a sequence of {longest} tokens exceeds the context length of {second.path}, {positions}",
                key="prompts" if self.texts is None else "texts",
            )
        return token_table(
            first.model,
            second.model,
            rollouts,
            self.sampling.temperature,
            read=read,
            cluster=cluster,
            group_size=None if self.prompts is None else count,
            advance=advance,
        )


def _positions(loaded: Loaded) -> int | None:
    """The context length of a model; None without a limit."""
    return getattr(loaded.model.config, "max_position_embeddings", None)
