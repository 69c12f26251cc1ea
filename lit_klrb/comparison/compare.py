"""A policy against a reference, on prompts or on given texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.comparison.estimates import TokenTable
from lit_klrb.comparison.measure import (
    Advance,
    encode_prompts,
    encode_windows,
    load,
    noise_floor,
    notes_of,
    prompt_batches,
    read_rows,
    sampled_rollouts,
    text_rollouts,
    token_table,
)
from lit_klrb.data.batches import Batch
from lit_klrb.data.lengths import context_length
from lit_klrb.data.rows import RawRow
from lit_klrb.engine.generation import Sampling
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.pair import Pair

# Starts a progress bar with a description and a number of rows.
Track = Callable[[str, int], Advance]


class Measured(NamedTuple):
    """What was measured of a policy and a reference."""

    policy: str
    reference: str
    tokenizers: str  # what `notes_of` said
    tables: dict[str, TokenTable]  # statistics by direction, "forward" and "reverse"
    floor: dict[str, TokenTable]  # statistics of the policy against itself, see `noise_floor`
    unfinished: float | None  # fraction of the policy's completions that did not end; None for given texts
    own_context: bool  # whether the reference reads other prompts than the policy


class _Read(NamedTuple):
    """What both models read: batches and prompts of the second model by direction, and each row's cluster."""

    rollouts: dict[str, list[Rollout]]
    others: dict[str, list[Batch]]
    cluster: Tensor


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """The models, the prompts or texts, and how they are measured; see `lit-klrb kl --help`."""

    policy: str
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
        check_at_least(0, seed=self.seed)
        if self.prompts is None:
            check_at_least(2, max_tokens=self.max_tokens)
        if self.prompts is None and self.teacher_system is not None:
            raise ConfigurationError("needs prompts: texts have no system prompt", key="teacher_system")

    def run(self, track: Track) -> Measured:
        """Load both models, which are in memory together, and measure."""
        key, source = ("prompts", self.prompts) if self.prompts is not None else ("texts", self.texts)
        rows = read_rows(key, str(source), self.limit)
        reference = load("reference", self.reference, self.device)
        policy, temperature = load("policy", self.policy, self.device), self.sampling.temperature
        pairs = {
            "forward": Pair(policy, reference, temperature=temperature),
            "reverse": Pair(reference, policy, temperature=temperature),
        }
        read = self._texts(pairs, rows) if self.prompts is None else self._prompts(pairs, rows, track)
        unfinished, group_size = None, None
        if self.prompts is not None:
            group_size = self.sampling.completions_per_prompt
            cut = torch.cat([rollout.unfinished(policy.ends) for rollout in read.rollouts["forward"]])
            unfinished = cut.double().mean().item()
        tables = {
            direction: token_table(
                pairs[direction],
                read.rollouts[direction],
                key=key,
                others=read.others.get(direction, ()),
                cluster=read.cluster,
                group_size=group_size,
                advance=track(f"{direction} KL", len(read.cluster)),
            )
            for direction in self.directions
        }
        floor = noise_floor(policy.model, read.rollouts["forward"][0], temperature)
        notes, own_context = notes_of(pairs["forward"]), bool(read.others)
        return Measured(self.policy, self.reference, notes, tables, floor, unfinished, own_context)

    def _texts(self, pairs: Mapping[str, Pair], rows: Sequence[RawRow]) -> _Read:
        policy = pairs["forward"].first
        length = min(self.max_tokens, context_length(policy.model) or self.max_tokens)
        windows, numbers = encode_windows(str(self.texts), rows, policy.tokenizer, length)
        rollouts = text_rollouts(windows, policy.tokenizer.pad_token_id, self.batch_size)
        return _Read(dict.fromkeys(pairs, rollouts), {}, torch.tensor(numbers))

    def _prompts(self, pairs: Mapping[str, Pair], rows: Sequence[RawRow], track: Track) -> _Read:
        tokenizer, systems = pairs["forward"].tokenizer, (self.system, self.teacher_system)
        prompts = encode_prompts(str(self.prompts), rows, tokenizer, *systems)
        own = [prompt.tokens for prompt in prompts]
        teacher_prompts = [prompt.tokens if prompt.teacher is None else prompt.teacher for prompt in prompts]
        batches = {
            direction: prompt_batches(some, pairs[direction], self.batch_size)
            for direction, some in (("forward", own), ("reverse", teacher_prompts))
        }
        rollouts = {}
        for direction in dict.fromkeys(("forward", *self.directions)):  # the noise floor is the policy's
            pair = pairs[direction]
            advance = track(f"completions of {pair.first.path}", len(prompts))
            arguments = batches[direction], self.sampling
            rollouts[direction] = sampled_rollouts(pair, *arguments, seed=self.seed, advance=advance)
        others = (
            {} if own == teacher_prompts else {"forward": batches["reverse"], "reverse": batches["forward"]}
        )
        cluster = torch.arange(len(prompts)).repeat_interleave(self.sampling.completions_per_prompt)
        return _Read(rollouts, others, cluster)
