"""A pair of models, a policy and the reference of its KL: what each reads, sampling and scoring."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.chat import as_messages, is_messages
from lit_klrb.data.columns import PROMPT
from lit_klrb.data.encode import control_tokens, decoded, end_tokens
from lit_klrb.data.lengths import check_context_length
from lit_klrb.engine.generation import Sampling, generate_completions, sampling_settings
from lit_klrb.engine.served import ServedTeacher
from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TokenStats, TopK
from lit_klrb.models import loading
from lit_klrb.models.adapters import adapter_off, has_adapter
from lit_klrb.models.rollout import Rollout
from lit_klrb.models.tokenizers import common_vocabulary
from lit_klrb.reward_functions import IDS, LateColumns
from lit_klrb.rollouts.scoring import Scorer
from lit_klrb.rollouts.teachers import TeachersScorer, TeacherStates, teachers_of
from lit_klrb.terminal import say_once


class Loaded(NamedTuple):
    """A model and its tokenizer, with the argument that names them and its value, for error messages."""

    key: str
    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, key: str, path: str) -> "Loaded":
        """Load both from a hub id, a folder, a .gguf file or a checkpoint."""
        return cls(key, path, *loading.load(key, path))

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a completion, the tokenizer's EOS first."""
        return end_tokens(self.tokenizer, self.model)

    @property
    def rows(self) -> int:
        """Number of rows of its head, which padding can make larger than the vocabulary."""
        head: Any = self.model.get_output_embeddings()
        return len(head.weight)


@dataclass(eq=False)
class Pair:
    """A policy and the reference of its KL, both at the sampling temperature.

    Rows of one embedding that the other lacks, such as padding, are left out of both distributions: their
    logits are −∞ in samples and statistics, see `common_vocabulary`.

    Args:
        first: The policy.
        second: The reference; None for the policy, with its adapter disabled or as it is.
        temperature: Divides the logits of both models.
        itself: Whether the policy itself, with a stopped gradient, is the reference.
        stop_at_eos: Whether ends end a completion; if not, all have the maximum length.
        teacher: A reference in an engine of its own, which takes the place of `second`.
        by_teacher: In place of one reference, the pairs of the policy with each of several, by the name that
            rows have in the column `teacher`.

    Attributes:
        vocabulary_size: V, the rows that both heads have.
        note: What is left out of the distributions, as a line of text; None for nothing.

    Raises:
        ConfigurationError: If a token id has two meanings, or there is no reference.
    """

    first: Loaded
    second: Loaded | None = None
    _: KW_ONLY
    temperature: float = 1.0
    itself: bool = False
    stop_at_eos: bool = True
    teacher: ServedTeacher | None = None
    by_teacher: Mapping[str, "Pair"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scorer: Scorer
        if self.by_teacher:
            self._join(list(self.by_teacher.values()))
            return
        if self.second is None and not (self.itself or self.teacher or has_adapter(self.policy)):
            problem = "None means the policy with its adapter disabled, but the policy has no adapter"
            remedy = "name the reference, or train an adapter (lora)"
            raise ConfigurationError(f"{problem}; {remedy}", key="reference_path")
        self.vocabulary_size, self.note = self.first.rows, None
        if self.second is not None:
            both = [(each.tokenizer.get_vocab(), each.rows) for each in (self.first, self.second)]
            self.vocabulary_size, self.note = common_vocabulary(self.second.key, self.second.path, *both)
        for each in filter(None, (self.first, self.second)):
            if settings := sampling_settings(each.model):
                say_once(
                    f"the generation_config of {each.path} has {settings}, which is not used: completions "
                    "are samples of the model itself"
                )
        self.scorer = Scorer(
            self.policy, self.reference, self.temperature, self.reading_reference, self.teacher, self.rows
        )

    def _join(self, pairs: list["Pair"]) -> None:
        """Take the vocabulary that all pairs must share, and a scorer of all teachers."""
        if len({(pair.vocabulary_size, pair.rows) for pair in pairs}) > 1:
            raise ConfigurationError("must have one vocabulary", key="teachers")
        self.vocabulary_size, self.note = pairs[0].vocabulary_size, pairs[0].note
        served = [pair.teacher.k for pair in pairs if pair.teacher is not None]
        head = TopK(served[0], "reference") if served else None
        # It has what a step uses of a scorer
        self.scorer = cast(Scorer, TeachersScorer([pair.scorer for pair in pairs], head))

    @property
    def references(self) -> list[Loaded]:
        """The references that are loaded on this machine."""
        return [own for pair in (self, *self.by_teacher.values()) if (own := pair.second) is not None]

    @property
    def served(self) -> list[ServedTeacher]:
        """The references that are served by other engines."""
        return [own for pair in (self, *self.by_teacher.values()) if (own := pair.teacher) is not None]

    @property
    def policy(self) -> PreTrainedModel:
        """The model that is sampled from and trained."""
        return self.first.model

    @property
    def reference(self) -> PreTrainedModel:
        """The frozen reference, or the policy if that is its own reference."""
        return self.policy if self.second is None else self.second.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return self.first.tokenizer

    @property
    def ends(self) -> tuple[int, ...]:
        """The policy's tokens that end a completion."""
        return self.first.ends

    @cached_property
    def controls(self) -> tuple[str, ...]:
        """The control tokens, which rewards do not read."""
        return control_tokens(self.tokenizer, self.ends)

    @property
    def rows(self) -> int | None:
        """The number of rows that both heads have in common; None if neither has more."""
        return None if self.note is None else self.vocabulary_size

    def reading_reference(self) -> AbstractContextManager[PreTrainedModel]:
        """A context manager that yields the reference: a model, or the policy with its adapter disabled."""
        if self.second is None and not self.itself and has_adapter(self.policy):
            return adapter_off(self.policy)
        return nullcontext(self.reference)

    def sample(
        self,
        batch: Mapping[str, Any],
        sampling: Sampling,
        *,
        seed: int,
        rows_before: int = 0,
        backend: Callable[..., Rollout] = generate_completions,
        of_reference: bool = False,
    ) -> Rollout:
        """Sample completions of a batch of prompts, see `generate_completions`.

        Args:
            batch: P prompts, and those that the reference reads.
            sampling: Number of completions, maximum length, temperature.
            seed: Seed of the samples.
            rows_before: Number of sequences of the same batch that other calls sample before these.
            backend: Samples in place of `generate_completions`.
            of_reference: Sample from the reference, after the prompts that it reads.
        """
        own = {
            name: batch.get(f"teacher_{name}", batch[name]) if of_reference else batch[name]
            for name in ("tokens", "attention_mask")
        }
        reading = self.reading_reference() if of_reference else nullcontext(self.policy)
        rows = {} if self.rows is None else {"rows": self.rows}
        with reading as model:
            return backend(
                model,
                own["tokens"],
                own["attention_mask"],
                sampling,
                seed=seed,
                ends=self.ends if self.stop_at_eos else (),
                pad_token_id=self.tokenizer.pad_token_id,
                rows_before=rows_before,
                **rows,
            )

    def read(self, rollout: Rollout, batch: Mapping[str, Any], key: str = "max_new_tokens") -> Rollout:
        """A rollout as the reference reads it: after its own prompts, if the batch has them.

        Raises:
            ConfigurationError: If the policy is its own reference and reads the same prompts, or the rollout
                exceeds the reference's context length.
        """
        if "teacher_tokens" in batch:
            rollout = rollout.after(batch["teacher_tokens"], batch["teacher_attention_mask"])
        elif self.itself:
            problem = "policy has a KL of 0 to the policy on the same prompts: give the teacher its own by"
            remedy = (
                "data.teacher_system_prompt or the column teacher_prompt; a folder of that name is ./policy"
            )
            raise ConfigurationError(f"{problem} {remedy}", key="reference_path")
        if self.teacher is None:
            length = int(rollout.attention_mask.sum(1).max())
            name = "the reference" if self.second is None else self.second.path
            check_context_length(self.reference, length, name, key=key)
        return rollout

    def states(self, rollout: Rollout, batch: Mapping[str, Any]) -> Tensor:
        """The reference's part of the statistics, see `Scorer.reference_states`.

        With several teachers it is a `TeacherStates`, which is sliced and moved as a tensor is.
        """
        if not self.by_teacher:
            return self.scorer.reference_states(self.read(rollout, batch))
        chosen = teachers_of(batch.get("rows", [{}]), list(self.by_teacher)).to(rollout.tokens.device)
        count = len(rollout.tokens) // len(chosen)
        prompts = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        parts = []
        for index, pair in enumerate(self.by_teacher.values()):
            own = chosen == index
            rows, some = own.repeat_interleave(count), {name: value[own] for name, value in prompts.items()}
            parts.append(pair.states(rollout.rows(rows), some) if own.any() else torch.empty(0))
        return cast(Tensor, TeacherStates(chosen.repeat_interleave(count), parts))

    def score(
        self,
        rollout: Rollout,
        batch: Mapping[str, Any],
        token_values: Tensor | None = None,
        topk: TopK | None = None,
        jsd_weight: float | None = None,
    ) -> tuple[Tensor, TokenStats]:
        """The reference's hidden states, shape [B, T, D], see `states`; and the token statistics, [B, T]."""
        states = self.states(rollout, batch)
        return states, self.scorer.stats(rollout, states, token_values, topk, jsd_weight)

    def texts(self, rollout: Rollout, part: slice = slice(None)) -> list[str]:
        """Each sequence as a text, prompt and completion."""
        # Replace tokens after the end, which need not be padding tokens
        tokens = rollout.tokens.masked_fill(~rollout.attention_mask, self.tokenizer.pad_token_id)
        return decoded(tokens[:, part].tolist(), self.tokenizer, self.controls)

    def columns(self, rollout: Rollout, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """What functions of completions read: prompts and completions, and the columns of the data.

        Prompts and completions are texts; those of conversations are lists of messages, as in TRL.

        Args:
            rollout: K completions of each of P prompts, prompt-major.
            batch: The prompts; its `rows`, if it has them, are P mappings of other columns of the data.
        """
        rows, width = batch.get("rows", ()), rollout.mask.shape[1]
        parts = {"prompts": slice(-width), "completions": slice(-width, None)}
        texts = {name: self.texts(rollout, part) for name, part in parts.items()}
        repeats = len(rollout.tokens) // max(len(rows), 1)
        columns = {
            name: [row.get(name) for row in rows for _ in range(repeats)]
            for name in dict.fromkeys(name for row in rows for name in row)
        }
        conversations: Any = columns.get(PROMPT, ())
        if all(map(is_messages, conversations or [None])):
            del columns[PROMPT]
            return columns | as_messages(conversations, texts["completions"])
        return columns | texts

    def rewards(self, reward: Callable[..., Tensor], rollout: Rollout, batch: Mapping[str, Any]) -> Tensor:
        """The reward of each sequence, shape [B]."""

        def columns() -> dict[str, list[Any]]:
            pairs = zip(rollout.completions.cpu(), rollout.mask.cpu(), strict=True)
            return self.columns(rollout, batch) | {IDS: [tokens[mask].tolist() for tokens, mask in pairs]}

        return reward(self.texts(rollout), LateColumns(columns)).to(rollout.tokens.device)
