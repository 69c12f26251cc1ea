"""One or several policies against a reference, on prompts or on given texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lit_klrb.comparison.estimates import TokenTable
from lit_klrb.comparison.inputs import encode_prompts, encode_windows, read_column, read_teachers
from lit_klrb.comparison.measure import (
    Advance,
    Loaded,
    after_prompts,
    check_context,
    check_tokenizers,
    load,
    noise_floor,
    sampled_rollouts,
    text_rollouts,
    token_table,
)
from lit_klrb.comparison.summary import Candidate
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.models.generation import Rollout, Sampling

# Starts a progress bar with a description and a number of rows.
Track = Callable[[str, int], Advance]


@dataclass(frozen=True, kw_only=True)
class Comparison:
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
        entries = read_column(key, str(source), key.removesuffix("s"), self.limit)
        reference = load("reference", self.reference, self.device)
        shared: list[Rollout] = []  # the reference's completions, the same for all policies
        return [self._candidate(path, reference, entries, shared, track) for path in self.policies]

    def _candidate(
        self, path: str, reference: Loaded, entries: list[object], shared: list[Rollout], track: Track
    ) -> Candidate:
        policy = load("policy", path, self.device)
        notes, unfinished = check_tokenizers("reference", policy, reference), None
        if self.prompts is None:
            rollouts, cluster = self._windows(policy, entries)
            by_direction, others = dict.fromkeys(self.directions, rollouts), {}
        else:
            teachers = read_teachers("prompts", str(self.prompts), self.limit)
            prompts = encode_prompts(
                "prompts", entries, policy.tokenizer, self.system, teachers, self.teacher_system
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
        tables = {
            direction: self._table(
                policy, reference, direction, by_direction[direction], others.get(direction), cluster, track
            )
            for direction in self.directions
        }
        floor = noise_floor(policy.model, rollouts[0], self.sampling.temperature)
        return Candidate(path, notes, tables, floor, unfinished, bool(others))

    def _windows(self, policy: Loaded, entries: list[object]) -> tuple[list[Rollout], torch.Tensor]:
        positions = getattr(policy.model.config, "max_position_embeddings", None) or self.max_tokens
        length = min(self.max_tokens, positions)
        windows, numbers = encode_windows("texts", entries, policy.tokenizer, length)
        rollouts = text_rollouts(windows, policy.tokenizer.pad_token_id, self.batch_size)
        return rollouts, torch.tensor(numbers)

    def _completions(self, loaded: Loaded, prompts: list[list[int]], track: Track) -> list[Rollout]:
        advance = track(f"completions of {loaded.path}", len(prompts))
        settings = {"seed": self.seed, "batch_size": self.batch_size}
        return sampled_rollouts(loaded, prompts, self.sampling, **settings, advance=advance)

    def _table(
        self,
        policy: Loaded,
        reference: Loaded,
        direction: str,
        rollouts: list[Rollout],
        prompts: list[list[int]] | None,
        cluster: torch.Tensor,
        track: Track,
    ) -> TokenTable:
        first, second = (policy, reference) if direction == "forward" else (reference, policy)
        count = self.sampling.completions_per_prompt
        read = rollouts if prompts is None else after_prompts(rollouts, prompts, count, second)
        check_context("prompts" if self.texts is None else "texts", second, read)
        return token_table(
            first.model,
            second.model,
            rollouts,
            self.sampling.temperature,
            read=read,
            cluster=cluster,
            group_size=None if self.prompts is None else count,
            advance=track(f"{direction} KL of {policy.path}", len(cluster)),
        )
