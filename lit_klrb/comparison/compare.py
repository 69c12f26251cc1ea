"""One or several policies against a reference, on prompts or on given texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lit_klrb.comparison.measure import (
    Advance,
    encode_prompts,
    encode_windows,
    load,
    noise_floor,
    notes_of,
    prompt_batches,
    read_table,
    sampled_rollouts,
    text_rollouts,
    token_table,
)
from lit_klrb.comparison.report import Candidate
from lit_klrb.data.kinds import TEACHER_PROMPT
from lit_klrb.data.lengths import context_length
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.models.generation import Rollout, Sampling
from lit_klrb.rollouts.pair import Loaded, Pair

# Starts a progress bar with a description and a number of rows.
Track = Callable[[str, int], Advance]


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """The models, the prompts or texts, and how they are measured; see `python -m lit_klrb kl --help`.

    Policies are loaded one after the other: two models are in memory, and a third during the noise floor.
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
        """Measure all policies."""
        key, source = ("prompts", self.prompts) if self.prompts is not None else ("texts", self.texts)
        table = read_table(key, str(source), key.removesuffix("s"), self.limit)
        reference = load("reference", self.reference, self.device)
        # The reference's completions, the same for all policies that have the same rows
        shared: dict[int, list[Rollout]] = {}
        return [self._candidate(path, reference, table, shared, track) for path in self.policies]

    def _candidate(
        self,
        path: str,
        reference: Loaded,
        given: dict[str, list[Any]],
        shared: dict[int, list[Rollout]],
        track: Track,
    ) -> Candidate:
        policy, temperature = load("policy", path, self.device), self.sampling.temperature
        pairs = {
            "forward": Pair(policy, reference, temperature=temperature),
            "reverse": Pair(reference, policy, temperature=temperature),
        }
        unfinished, others = None, {}
        if self.prompts is None:
            length = min(self.max_tokens, context_length(policy.model) or self.max_tokens)
            windows, numbers = encode_windows("texts", given["text"], policy.tokenizer, length)
            rollouts = text_rollouts(windows, policy.tokenizer.pad_token_id, self.batch_size)
            by_direction = dict.fromkeys(self.directions, rollouts)
            cluster = torch.tensor(numbers)
        else:
            teachers = given.get(TEACHER_PROMPT, ())
            settings = policy.tokenizer, self.system, teachers, self.teacher_system
            prompts = encode_prompts("prompts", given["prompt"], *settings)
            own = [prompt.tokens for prompt in prompts]
            theirs = [prompt.tokens if prompt.teacher is None else prompt.teacher for prompt in prompts]
            batches = {
                direction: prompt_batches(some, pairs[direction], self.batch_size)
                for direction, some in (("forward", own), ("reverse", theirs))
            }
            if own != theirs:
                others = {"forward": batches["reverse"], "reverse": batches["forward"]}

            def completed(direction: str) -> list[Rollout]:
                pair, some = pairs[direction], batches[direction]
                advance = track(f"completions of {pair.first.path}", len(prompts))
                return sampled_rollouts(pair, some, self.sampling, seed=self.seed, advance=advance)

            rollouts, rows = completed("forward"), pairs["reverse"].vocabulary_size
            if "reverse" in self.directions and rows not in shared:
                shared[rows] = completed("reverse")
            cut = torch.cat([rollout.unfinished(policy.ends) for rollout in rollouts])
            unfinished = cut.double().mean().item()
            by_direction = {"forward": rollouts, "reverse": shared.get(rows, [])}
            cluster = torch.arange(len(prompts)).repeat_interleave(self.sampling.completions_per_prompt)
        tables = {
            direction: token_table(
                pairs[direction],
                by_direction[direction],
                key="texts" if self.prompts is None else "prompts",
                others=others.get(direction, ()),
                cluster=cluster,
                group_size=None if self.prompts is None else self.sampling.completions_per_prompt,
                advance=track(f"{direction} KL of {path}", len(cluster)),
            )
            for direction in self.directions
        }
        floor = noise_floor(policy.model, rollouts[0], temperature)
        return Candidate(path, notes_of(pairs["forward"]), tables, floor, unfinished, bool(others))
