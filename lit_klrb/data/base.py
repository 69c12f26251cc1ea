"""Base class of the data modules: a corpus, and batches that are a function of (seed, step)."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import lightning as L
from torch.utils.data import DataLoader

from lit_klrb.data.batches import Batch
from lit_klrb.data.corpora import TEXT, given_prompts
from lit_klrb.data.interfaces import Learner
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
    """Infinite training batches and finite evaluation batches from a corpus of reviews.

    Every training batch is a function of (seed, step), so a resumed run continues with the same batches.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file with the
            columns text and label.
        batch_size: Examples per training batch.
        train_size: Number of training reviews; 0 for all.
        eval_size: Number of validation and of test reviews.
        eval_batch_size: Examples per evaluation batch.
        seed: Seed of the order of the training data; set by --seed_everything.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    # The content of batches in training and in evaluation; must equal what a module declares in `reads`.
    contents: ClassVar[tuple[str, str]]
    # Names of the column with the texts, of which the first that exists is read.
    columns: ClassVar[tuple[str, ...]] = (TEXT,)

    source: str = "grammar"
    batch_size: int
    train_size: int
    eval_size: int
    eval_batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        check_at_least(1, batch_size=self.batch_size, eval_batch_size=self.eval_batch_size)
        check_at_least(0, train_size=self.train_size)
        check_at_least(1, eval_size=self.eval_size)
        self.sizes = {"train": self.train_size, "validation": self.eval_size, "test": self.eval_size}
        # What `load` gives for each split: reviews, prompts or pairs.
        self.reviews: dict[str, Sequence[Any]] = {}

    @abstractmethod
    def load(self, split: str) -> Sequence[Any]:
        """Load a split of the source."""

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
        module = self._module
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
        self._check_module(stage)
        for split in SPLITS[stage]:
            given = given_prompts(self.source, self.columns) if stage == "predict" else None
            if given is not None:
                self.reviews[split] = given
                continue
            announced = split in self.reviews
            self.reviews[split] = self.load(split)
            if len(self.reviews[split]) < self.sizes[split] and not announced:
                log.warning(
                    "%s is %d, but the %s split of %s has %d texts: all are used",
                    "train_size" if split == "train" else "eval_size",
                    *(self.sizes[split], split, self.source, len(self.reviews[split])),
                )

    def _check_module(self, stage: str) -> None:
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
        module = self._module
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
