"""Base class of the data modules: a corpus, and batches that are a function of (seed, step)."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import lightning as L
from torch.utils.data import DataLoader

from lit_klrb.data.batches import Batch
from lit_klrb.data.corpora import Source, given_prompts, load_rows
from lit_klrb.data.encode import Reader, end_tokens
from lit_klrb.data.interfaces import Learner
from lit_klrb.data.kinds import Row, Want
from lit_klrb.data.lengths import Overlong, Selection
from lit_klrb.data.samplers import StepBatchSampler
from lit_klrb.errors import ConfigurationError, check_at_least

log = logging.getLogger(__name__)

SPLITS = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}


# Settings are dataclass fields, as those of the modules.
@dataclass(kw_only=True, eq=False, repr=False)
class CorpusDataModule(L.LightningDataModule, ABC):
    """Infinite training batches and finite evaluation batches from rows of data.

    Every training batch is a function of (seed, step), so a resumed run continues with the same batches.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a file (.jsonl, .json, .csv, .tsv,
            .parquet, .txt, each also .gz).
        subset: The subset of a hub id, such as main; or of a folder.
        split: The split to train on, such as train_prefs; several are joined by "+".
        eval_split: The split of the evaluation; by default those named validation and test, or held-out rows.
        overlong: What is done about rows with too many tokens: leave_out, cut (the end of the answer, which
            then has no end) or refuse.
        chat_template_kwargs: Settings of the chat template, such as {enable_thinking: false}.
        system_prompt: A system message for conversations without one.
        batch_size: Examples per training batch.
        train_size: Number of training rows; 0 for all.
        eval_size: Number of validation and of test rows.
        eval_batch_size: Examples per evaluation batch.
        seed: Seed of the order of the training data; set by --seed_everything.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    # The content of batches in training and in evaluation; must equal what a module declares in `reads`.
    contents: ClassVar[tuple[str, str]]
    # What is read of each row.
    want: ClassVar[Want]

    source: str = "grammar"
    subset: str | None = None
    split: str = "train"
    eval_split: str | None = None
    batch_size: int
    train_size: int
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
        check_at_least(1, eval_size=self.eval_size)
        names = self.split.split("+")
        if not all(names) or len(set(names)) < len(names) or self.eval_split in names:
            raise ConfigurationError(
                f"must name different splits, and not the evaluation's, got {self.split}", key="split"
            )
        self.sizes = {"train": self.train_size, "validation": self.eval_size, "test": self.eval_size}
        self.reviews: dict[str, Sequence[Row]] = {}
        # What became of the rows of each split
        self.selections: dict[str, Selection] = {}
        self._preview: Learner | None = None

    @property
    def rows(self) -> Source:
        """Where the rows come from."""
        return Source(self.source, self.want, self.subset, self.split, self.eval_split)

    def load(self, split: str) -> Sequence[Row]:
        """Load a split of the source."""
        return load_rows(self.rows, split, self.sizes[split])

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
        learner = self.learner
        ends = end_tokens(learner.tokenizer, learner.trained)
        settings = self.system_prompt, self.chat_template_kwargs
        return Reader(
            key, learner.tokenizer, ends, *settings, say=partial(log.warning, "%s: %s", self.source)
        )

    def preview(self, learner: Learner) -> dict[str, Any]:
        """What the training data become, without a model: rows, what is left out and why, the first row.

        Args:
            learner: Has the tokenizer, and a model that needs no weights.
        """
        self._preview = learner
        for split in SPLITS["fit"]:
            if split not in self.reviews:
                self.reviews[split] = self.load(split)
        examples = self.examples("train")
        shown = self.selections["train"].summary() | {"kind": self.contents[0]}
        return shown | {"first": self.visible(examples[0])}

    @abstractmethod
    def visible(self, example: Any) -> str:
        """An example as the model reads it, with its special tokens and a bar before each answer."""

    @abstractmethod
    def examples(self, split: str) -> Sequence[Any]:
        """The examples of a split, from which batches are drawn."""

    @abstractmethod
    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Collate examples of a split into a batch."""

    @property
    def learner(self) -> Learner:
        """The module that is trained or evaluated.

        Raises:
            ConfigurationError: If it has no tokenizer or no model.
        """
        module: Any = self._preview or self._module
        if not isinstance(module, Learner):
            raise ConfigurationError(
                f"{type(self).__name__} needs a module with a tokenizer and a trained model, "
                f"got {type(module).__name__}"
            )
        return module

    @property
    def _module(self) -> L.LightningModule:
        assert self.trainer is not None
        return self.trainer.lightning_module

    def setup(self, stage: str) -> None:
        """Load the splits of the stage; for predict, all prompts of a file of prompts.

        Raises:
            ConfigurationError: If the module needs batches of another kind.
        """
        self.check_module(stage)
        for split in SPLITS[stage]:
            given = given_prompts(self.rows) if stage == "predict" and self.want == "prompts" else None
            if given is not None:
                self.reviews[split] = given
                continue
            announced = split in self.reviews
            self.reviews[split] = self.load(split)
            if len(self.reviews[split]) < self.sizes[split] and not announced:
                log.warning(
                    "%s is %d, but the %s split of %s has %d rows: all are used",
                    "train_size" if split == "train" else "eval_size",
                    *(self.sizes[split], split, self.source, len(self.reviews[split])),
                )

    def check_module(self, stage: str) -> None:
        """Check that the module reads what the batches contain.

        Raises:
            ConfigurationError: If not.
        """
        if self.trainer is None:
            return
        contents, module = self.contents[stage != "fit"], type(self._module).__name__
        reads = getattr(self._module, "reads", (None, None))[stage != "fit"]
        if contents != reads:
            needs = f"needs {reads}" if reads else "is not a module of lit_klrb"
            raise ConfigurationError(f"data: {type(self).__name__} provides {contents}, but {module} {needs}")

    def train_dataloader(self) -> DataLoader[Any]:
        """Infinite batches, starting with that of the current step."""
        assert self.trainer is not None
        examples: Any = self.examples("train")
        module, selection = self._module, self.selections.get("train")
        if selection is not None and selection.left_out:
            found, step = {"train/left_out": float(selection.left_out)}, self.trainer.global_step
            for logger in getattr(self.trainer, "loggers", ()):
                logger.log_metrics(found, step=step)
        sampler = StepBatchSampler(
            size=len(examples),
            batch_size=self.batch_size,
            seed=self.seed,
            start=self.trainer.global_step * self.trainer.accumulate_grad_batches,
            # A module that takes several steps on a rollout needs its batch for each
            repeat=getattr(module, "steps_per_batch", 1),
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
        return DataLoader(examples, batch_sampler=sampler, collate_fn=partial(self.collate, "train"))

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation split, in order."""
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        """The test split, in order."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test split or all prompts of a file, in order."""
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        examples: Any = self.examples(split)
        return DataLoader(examples, batch_size=self.eval_batch_size, collate_fn=partial(self.collate, split))
