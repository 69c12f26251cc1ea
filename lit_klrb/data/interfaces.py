"""Protocols between data modules and Lightning modules, which know each other only through them.

A module may train its tokenizer on the reviews of a data module (`Corpus`), which then encodes them with it
(`Learner`).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.kinds import Row
from lit_klrb.data.pairs import PreferencePair
from lit_klrb.data.prompts import Prompt


@runtime_checkable
class Learner(Protocol):
    """A module that is trained on the batches of a data module."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the texts."""

    @property
    def trained(self) -> PreTrainedModel:
        """The model that is trained on the batches."""


@runtime_checkable
class PairMaker(Protocol):
    """A module that makes preference pairs from prompts or from given completions."""

    def preference_pairs(self, prompts: Sequence[Prompt]) -> list[PreferencePair]:
        """Pairs of sampled completions."""

    def given_pairs(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """Pairs of given completions, with their log-probabilities under the reference."""


@runtime_checkable
class Corpus(Protocol):
    """A data module that provides complete reviews."""

    @property
    def reviews(self) -> Mapping[str, Sequence[Row]]:
        """The rows of each loaded split."""

    def entropy_per_token(self) -> float | None:
        """The lowest cross-entropy that any model can reach, in nats per token; None if it is unknown."""
