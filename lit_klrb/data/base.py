"""Base classes of the data modules: a corpus, and batches that are a function of (seed, step)."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.batches import Batch
from lit_klrb.data.columns import Want
from lit_klrb.data.corpora import GRAMMAR, Source, draw, given_prompts
from lit_klrb.data.encode import end_tokens
from lit_klrb.data.kinds import Row
from lit_klrb.data.lengths import Overlong, Selection
from lit_klrb.data.reader import Reader
from lit_klrb.data.samplers import StepBatchSampler
from lit_klrb.errors import ConfigurationError, check_at_least

log = logging.getLogger(__name__)

SPLITS = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}

# Maximum number of tokens of a row unless `max_tokens` or the model's context says otherwise.
LONGEST = 1024
# So many rows are read of larger data, or as many as the steps of a run use.
LEAST = 10_000


class Learner(Protocol):
    """A module that is trained on the batches of a data module."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def trained(self) -> PreTrainedModel:
        """The model that is trained."""


# Settings are dataclass fields, as those of the modules.
@dataclass(kw_only=True, eq=False, repr=False)
class CorpusDataModule(L.LightningDataModule, ABC):
    """Infinite training batches and finite evaluation batches from rows of data.

    Every training batch is a function of (seed, step), so a resumed run continues with the same batches.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a file (.jsonl, .json, .csv, .tsv,
            .parquet, .txt, each also .gz).
        subset: The subset of a hub id, such as main; or of a folder.
        columns: Names of columns to be read under the names of docs/corpus.md, such as {prompt: problem,
            completion: solution}, also of nested ones ({prompt: info.post}); null for one not to be read.
        split: The split to train on, such as train_prefs; several are joined by "+".
        eval_split: The split of the evaluation; by default those named validation and test, or held-out rows.
        overlong: What is done about rows with too many tokens: leave_out, cut (the end of the answer, which
            then has no end) or refuse.
        chat_template_kwargs: Settings of the chat template, such as {enable_thinking: false}.
        system_prompt: A system message for conversations without one.
        batch_size: Examples per training batch.
        train_size: Number of training rows, drawn at random; 0 for all, of which a run reads as many as its
            steps use, and at least 10,000.
        generated_size: Number of training rows of the embedded world, which has no end, without a train_size.
        eval_size: Number of validation and of test rows, drawn at random.
        eval_batch_size: Examples per evaluation batch.
        seed: Seed of the order of the training data; set by --seed_everything.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    # The content of batches in training and in evaluation; must equal what a module declares in `reads`.
    contents: ClassVar[tuple[str, str]]
    # What is read of each row.
    want: ClassVar[Want]

    source: str = GRAMMAR
    subset: str | None = None
    columns: dict[str, str | None] = field(default_factory=dict)
    split: str = "train"
    eval_split: str | None = None
    batch_size: int
    train_size: int = 0
    generated_size: int
    eval_size: int
    eval_batch_size: int
    overlong: Overlong = "leave_out"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        check_at_least(1, batch_size=self.batch_size, eval_batch_size=self.eval_batch_size)
        check_at_least(0, train_size=self.train_size)
        check_at_least(1, eval_size=self.eval_size, generated_size=self.generated_size)
        names = self.split.split("+")
        if not all(names) or len(set(names)) < len(names) or self.eval_split in names:
            problem = f"must name different splits, and not the evaluation's, got {self.split}"
            raise ConfigurationError(problem, key="split")
        # Upper bound of the numbers of rows, where not all of them are read
        self.at_most: int | None = None
        self.rows: dict[str, Sequence[Row]] = {}
        # What became of the rows of each split
        self.selections: dict[str, Selection] = {}
        self._said = set[str]()
        self._preview: Learner | None = None
        # The examples of each split that were shown
        self.examined: dict[str, Sequence[Any]] = {}
        self._ahead: Sequence[Any] | None = None  # training examples that were read before the evaluation

    def load(self, split: str) -> Sequence[Row]:
        """Load a split of the source."""
        return self.drawn(self.origin, split, self.eval_size if split != "train" else self.train_size)

    def drawn(self, source: Source, split: str, size: int) -> list[Row]:
        """Rows of a split, drawn at random; says if these are not all, or fewer than asked for."""
        name, steps, bound = "train_size" if split == "train" else "eval_size", self.rows_of_steps, size
        if not size:
            unbounded = 0 if steps is None else max(LEAST, steps)
            bound = self.generated_size if source.name == GRAMMAR else unbounded
        rows, total = draw(source, split, bound if self.at_most is None else min(bound, self.at_most))
        Selection(source.key, source.name, split).check(rows)
        if total is not None:
            why = f"{name}={size}" if size else f"the run's steps use {steps}"
            few = f"{len(rows)} of {total} rows are read for {split}, drawn at random"
            self.say(f"{source.name}: {few} ({why})")
        elif len(rows) < size and source.name != GRAMMAR:
            has = f"the {split} split of {source.name} has {len(rows)} rows"
            self.say(f"{name} is {size}, but {has}: all are used")
        return rows

    @property
    def rows_of_steps(self) -> int | None:
        """Number of training rows that the steps of the run use; None without an end."""
        trainer = self.trainer
        if trainer is None or trainer.max_steps < 0:
            return None
        return trainer.max_steps * trainer.accumulate_grad_batches * trainer.world_size * self.batch_size

    @property
    def origin(self) -> Source:
        """The source and what is read of it."""
        splits = self.subset, self.split, self.eval_split
        return Source(self.source, self.want, *splits, tuple(self.columns.items()))

    def read(
        self,
        split: str,
        rows: Sequence[Row],
        make: Callable[[int, Row], Any],
        limit: int | None = None,
        key: str = "source",
    ) -> list[Any]:
        """The examples of rows, without those that cannot be read, which are counted."""
        self.selections[split] = Selection(key, getattr(self, key), split, limit, self.overlong)
        return self.selections[split].read(rows, make)

    def reader(self, key: str = "source") -> Reader:
        """Reads prompts and answers as the learner does."""
        tokenizer, ends = self.learner.tokenizer, end_tokens(self.learner.tokenizer, self.learner.trained)
        template = self.chat_template_kwargs
        return Reader(key, tokenizer, ends, self.system_prompt, template, self.say_of_source)

    def say_of_source(self, line: str) -> None:
        """Say something about the source once."""
        self.say(f"{self.source}: {line}")

    def say(self, line: str) -> None:
        """Say something once."""
        if line not in self._said:
            self._said.add(line)
            log.warning(line)

    def preview(self, learner: Learner) -> dict[str, Any]:
        """What the training data become, without a model: rows, what is left out and why, the first row.

        Args:
            learner: Has the tokenizer, and a model that needs no weights.
        """
        self._preview = learner
        for split in SPLITS["fit"]:
            if split not in self.rows:
                self.rows[split] = self.load(split)
        self.examined = {split: self.examples(split) for split in SPLITS["fit"]}
        about = {"kind": self.contents[0], "first": self.visible(self.examined["train"][0])}
        return self.selections["train"].summary() | about

    @abstractmethod
    def visible(self, example: Any) -> str:
        """An example as the model reads it, with its special tokens and a bar before each answer."""

    @abstractmethod
    def examples(self, split: str) -> Sequence[Any]:
        """The examples of a split, from which batches are drawn."""

    def prepared(self, examples: Sequence[Any]) -> Sequence[Any]:
        """Training examples with what the module computes of them, which takes time."""
        return examples

    @abstractmethod
    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Collate examples of a split into a batch."""

    @property
    def learner(self) -> Learner:
        """The module that is trained or evaluated."""
        return cast(Learner, self._preview or self._module)

    def show(self, *parts: Sequence[int]) -> str:
        """Token ids as text, with bars between the parts."""
        return " | ".join(str(self.learner.tokenizer.decode(list(part))) for part in parts)

    @property
    def _module(self) -> L.LightningModule:
        assert self.trainer is not None
        return self.trainer.lightning_module

    def setup(self, stage: str) -> None:
        """Load the splits of the stage; for predict, all prompts of a file of prompts."""
        self.check_module(stage)
        for split in SPLITS[stage]:
            if stage == "predict" and self.want == "prompts" and (prompts := given_prompts(self.origin)):
                self.rows[split] = prompts
            else:
                self.rows[split] = self.load(split)

    def check_module(self, stage: str) -> None:
        """Check that the module reads what the batches contain."""
        if self.trainer is None:
            return
        contents, module = self.contents[stage != "fit"], self._module
        reads = getattr(module, "reads", (None, None))[stage != "fit"]
        if contents != reads:
            needs = f"{type(module).__name__} {f'needs {reads}' if reads else 'is not a module of lit_klrb'}"
            raise ConfigurationError(f"data: {type(self).__name__} provides {contents}, but {needs}")

    def train_dataloader(self) -> DataLoader[Any]:
        """Infinite batches, starting with that of the current step."""
        trainer = self.trainer
        assert trainer is not None
        examples: Any = self.prepared(self.examples("train") if self._ahead is None else self._ahead)
        self._ahead = None
        selection = self.selections.get("train")
        if selection is not None and selection.left_out:
            for logger in getattr(trainer, "loggers", ()):
                logger.log_metrics({"train/left_out": float(selection.left_out)}, step=trainer.global_step)
        sampler = StepBatchSampler(
            size=len(examples),
            batch_size=self.batch_size,
            seed=self.seed,
            start=trainer.global_step * trainer.accumulate_grad_batches,
            # A module that takes several steps on a rollout needs its batch for each
            repeat=getattr(self._module, "steps_per_batch", 1),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        return DataLoader(examples, batch_sampler=sampler, collate_fn=partial(self.collate, "train"))

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation split, in order; in training after that of training, which may be refused."""
        trainer = self.trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.sanity_checking:
            self._ahead = self.examples("train")
        return self._in_order("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        """The test split, in order."""
        return self._in_order("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test split or all prompts of a file, in order."""
        return self._in_order("test")

    def _in_order(self, split: str) -> DataLoader[Any]:
        examples: Any = self.examples(split)
        return DataLoader(examples, batch_size=self.eval_batch_size, collate_fn=partial(self.collate, split))
