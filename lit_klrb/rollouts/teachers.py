"""Statistics and losses with several teachers, each for the sequences whose rows name it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import LossWeights
from lit_klrb.functional import TokenStats, TopK
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.scoring import Scorer

# The column of the data that names a row's teacher
COLUMN = "teacher"


def teachers_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str], key: str = "teachers") -> Tensor:
    """The index of the teacher of each row, shape [P].

    Raises:
        ConfigurationError: If a row names none of the teachers.

    Example:
        >>> teachers_of([{"teacher": "code"}, {"teacher": "maths"}], ["maths", "code"])
        tensor([1, 0])
    """
    named = [row.get(COLUMN) for row in rows]
    if unknown := [name for name in named if name not in names]:
        missing = "a row has no" if unknown[0] is None else f"a row has {unknown[0]!r} in the"
        raise ConfigurationError(f"{missing} column {COLUMN}; the teachers are {', '.join(names)}", key=key)
    return torch.tensor([names.index(name) for name in named])


@final
class TeacherStates:
    """The states of several teachers for B sequences, each as of `Scorer.reference_states`.

    Args:
        teachers: The index of each sequence's teacher, shape [B].
        parts: The states of each teacher's sequences, in the order of these.
    """

    def __init__(self, teachers: Tensor, parts: Sequence[Tensor]) -> None:
        self.teachers, self.parts = teachers, list(parts)

    def __len__(self) -> int:
        return len(self.teachers)

    def __getitem__(self, rows: slice) -> "TeacherStates":
        """The states of adjacent sequences."""
        parts = []
        for index, part in enumerate(self.parts):
            before, until = (int((self.teachers[:end] == index).sum()) for end in (rows.start, rows.stop))
            parts.append(part[before:until])
        return TeacherStates(self.teachers[rows], parts)

    def to(self, device: torch.device) -> "TeacherStates":
        """Move the states to a device."""
        return TeacherStates(self.teachers.to(device), [part.to(device) for part in self.parts])

    def groups(self) -> Iterator[tuple[int, Tensor]]:
        """Each teacher of the sequences, and the indices of its sequences."""
        for index in sorted(set(self.teachers.tolist())):
            yield index, (self.teachers == index).nonzero().flatten()


@final
class TeachersScorer:
    """`Scorer` for a policy and several teachers; the policy reads the sequences of one after the other's.

    Args:
        scorers: The policy with each teacher.
        head: The head that served teachers send, of which the statistics of all are, so that they have the
            same fields; None without any.
    """

    def __init__(self, scorers: Sequence[Scorer], head: TopK | None = None) -> None:
        self.scorers, self.head = scorers, head
        self.logprobs = scorers[0].logprobs
        self.tiled = all(scorer.tiled for scorer in scorers)
        self.fuses = all(scorer.fuses for scorer in scorers)

    def stats(
        self,
        rollout: Rollout,
        reference_states: TeacherStates,
        token_values: Tensor | None = None,
        topk: TopK | None = None,
        jsd_weight: float | None = None,
    ) -> TokenStats:
        """As `Scorer.stats`, each sequence under its own teacher; the fields that all of them have."""
        sequences, by_teacher = [], []
        for index, rows in reference_states.groups():
            inputs = rollout.rows(rows), reference_states.parts[index]
            stats = self.scorers[index].stats(*inputs, token_values, topk or self.head, jsd_weight)
            by_teacher.append(stats)
            sequences.append(rows)
        order = torch.cat(sequences).argsort()
        together: list[Any] = [
            None if any(field is None for field in fields) else torch.cat(fields)[order]
            for fields in zip(*by_teacher, strict=True)
        ]
        return TokenStats(*together)

    def loss(
        self, rollout: Rollout, reference_states: TeacherStates, weights: LossWeights, *args: Any
    ) -> Tensor:
        """As `Scorer.loss`: the mean over all sequences."""
        behaviour, *settings = args
        total = torch.zeros((), device=rollout.tokens.device)
        for index, rows in reference_states.groups():
            own = rollout.rows(rows), reference_states.parts[index]
            weighted = weights.map(partial(torch.index_select, dim=0, index=rows))
            loss = self.scorers[index].loss(*own, weighted, behaviour[rows], *settings)
            total = total + len(rows) / len(reference_states) * loss
        return total
