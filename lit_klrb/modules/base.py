"""Base classes of the modules: a model, its tokenizer, its optimizer, and self-contained checkpoints."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_klrb import schema
from lit_klrb.distributed import FSDP2, check_strategy, sharding_mesh
from lit_klrb.errors import ConfigurationError, check_positive
from lit_klrb.models import loading
from lit_klrb.models.dry_run import current_dry_run
from lit_klrb.models.dtypes import set_dtypes, summary
from lit_klrb.models.precision import slow_precision
from lit_klrb.models.sharding import of_first, shard
from lit_klrb.modules.checkpointed import CheckpointedModule
from lit_klrb.modules.schedules import rate_factor
from lit_klrb.run.lightning_internals import keep_float32, trainer_of
from lit_klrb.run.options import RULES, check_training_options

log = logging.getLogger(__name__)

# What every batch contains: token ids and the mask of those that are not padding.
REQUIRED = {"tokens", "attention_mask"}
# What `build_models` makes of the classes below.
BUILT = ("policy", "classifier", "tokenizer", "reference", "pair", "split")
PROGRESS_BAR_METRICS = {schema.REWARD, schema.KL, schema.LOSS}


# Settings are dataclass fields, so every module inherits the documented settings of its base classes.
@dataclass(kw_only=True, eq=False, repr=False)
class TrainedModule(CheckpointedModule, ABC):
    """A module that trains a model and writes self-contained checkpoints.

    Models are built by `build_models`, when the trainer is known. `load_from_checkpoint` works without a
    trainer and takes the model from the checkpoint.

    Args:
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Decoupled weight decay of AdamW.
        adam_epsilon: Epsilon of AdamW.
        schedule: Learning rate after the warm-up: constant, or decaying to 0 over the run.
        warmup_steps: Optimizer steps over which the learning rate increases from 0.
        gradient_checkpointing: Store only the input of each block and recompute the rest in the backward
            pass: less memory, more time.
        seed: Seed of all random numbers of the module; set by --seed_everything.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    # Whether dropout is active in training. It is off where log-probabilities are compared with those of a
    # rollout or a reference, so that the ratio at the first inner step is exactly 1.
    uses_dropout: ClassVar[bool] = False
    # Whether the loss has a KL term, for which an estimator can be plugged in.
    uses_kl_estimator: ClassVar[bool] = False
    # Whether its models can be divided among processes.
    shards: ClassVar[bool] = False
    # Content of its batches in training and in evaluation; must equal `contents` of the data module.
    reads: ClassVar[tuple[str, str]]

    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    adam_epsilon: float = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    gradient_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        # The precision for which the models were built
        self._built_for: str | None = None
        # Names of what the evaluation before the first step has found
        self.first_metrics: set[str] = set()
        self.save_hyperparameters()
        check_positive(learning_rate=self.learning_rate)
        for name in ("weight_decay", "adam_epsilon", "warmup_steps"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigurationError(f"must be finite and 0 or larger, got {value}", key=name)

    @abstractmethod
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one step."""

    def setup(self, stage: str) -> None:
        """Check options of the trainer that infinite training data do not allow."""
        keep_float32(self.trainer)
        check_strategy(self.trainer)
        self._check_sharding()
        if stage == "fit" and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_training_options({name: getattr(self.trainer, name, None) for name in RULES})
            slow = slow_precision(self.trainer.precision, self.trainer.strategy.root_device)
            if slow is not None:
                log.warning(slow)

    def _check_sharding(self) -> None:
        if not isinstance(self.trainer.strategy, FSDP2):
            return
        if not self.shards:
            problem = f"fsdp2 does not support {type(self).__name__}; use ddp, or one device"
            raise ConfigurationError(problem, key="trainer.strategy")
        if getattr(self, "reference_path", None) == loading.ITSELF:
            raise ConfigurationError(f"{loading.ITSELF!r} is not supported by fsdp2", key="reference_path")

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Refuse batches of another kind, such as those of a data module from another project."""
        names = isinstance(batch, Mapping) and batch.keys()
        if not names or not names >= REQUIRED:
            data = type(getattr(self.trainer, "datamodule", None)).__name__
            actual = f"dictionaries of {', '.join(map(str, names))}" if names else type(batch).__name__
            raise ConfigurationError(
                f"data: the batches of {data} are {actual}, but {type(self).__name__} reads dictionaries of "
                f"tensors with {' and '.join(sorted(REQUIRED))}, both [B, N]"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """The check of `on_validation_batch_start`, for a training batch."""
        self.on_validation_batch_start(batch, batch_idx)

    def configure_model(self) -> None:
        """Build the models once. Under FSDP2 the first process does, and each gets its part of them.

        A trainer of another precision changes their dtypes.
        """
        trainer = trainer_of(self)
        if trainer is None or self._built_for == trainer.precision:
            return
        mesh = None if current_dry_run() else sharding_mesh(trainer)
        if mesh is None:
            self._build()
        elif self._built_for is None:
            for name, value in of_first(self._build).items():
                setattr(self, name, value)
            for model in self.children():
                if isinstance(model, PreTrainedModel):
                    shard(model, mesh)
            # Lightning restores the checkpoint, which omits the reference; the rest has been checked
            self.strict_loading = False
        self._built_for = trainer.precision

    def _build(self) -> dict[str, Any]:
        if self._built_for is None:
            self.build_models()
        for model in self.models().values():
            set_dtypes(model, self.trainer.precision)
        return {name: getattr(self, name) for name in BUILT if hasattr(self, name)}

    def models(self) -> dict[str, PreTrainedModel]:
        """The trained model and frozen ones, by name."""
        return {name: model for name, model in self.named_children() if isinstance(model, PreTrainedModel)}

    @property
    def dtypes(self) -> str:
        """One line on the dtypes of all models."""
        return summary(self.models(), self.trainer.precision)

    def on_fit_start(self) -> None:
        """Print the dtypes of all models."""
        self.print(f"weights: {self.dtypes}")

    def computing(self) -> AbstractContextManager[Any]:
        """The context in which the trainer's precision computes, for passes outside of its steps."""
        return self.trainer.precision_plugin.forward_context()

    def configure_optimizers(self) -> Any:
        """AdamW on the trained parameters, with a schedule per optimizer step."""
        parameters = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        settings: dict[str, Any] = {"weight_decay": self.weight_decay, "eps": self.adam_epsilon}
        optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate, fused=True, **settings)
        # Lightning refuses to clip gradients that an optimizer unscales itself; without this it does not
        optimizer._step_supports_amp_scaling = False
        trainer = self.trainer
        rate = partial(rate_factor, schedule=self.schedule, warmup_steps=self.warmup_steps)
        scheduler = LambdaLR(optimizer, partial(rate, max_steps=trainer.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Set the training mode, and enable gradient checkpointing and compilation if configured."""
        # `from_pretrained` and validation leave the model in eval mode
        self.trained.train(self.uses_dropout)
        if self.gradient_checkpointing:
            blocks = [m for m in self.trained.modules() if isinstance(m, GradientCheckpointingLayer)]
            if not blocks:
                problem = f"{type(self.trained).__name__} does not support it"
                raise ConfigurationError(problem, key="gradient_checkpointing")
            enable = getattr(self.trained, "activation_checkpointing_enable", None)
            # The name before transformers 5.21
            (enable or self.trained.gradient_checkpointing_enable)({"use_reentrant": False})
            for block in blocks:
                # Blocks checkpoint in training mode only; this does not change the mode of dropout layers
                block.training = True

    def on_validation_epoch_end(self) -> None:
        """Log the evaluation."""
        self.conclude_evaluation("val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """The evaluation on a batch of the test split."""
        return self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log the evaluation on the test split."""
        self.conclude_evaluation("test")

    @abstractmethod
    def conclude_evaluation(self, stage: str) -> None:
        """Log what `validation_step` collected, as metrics of "val" or "test"."""

    def log_metrics(self, stage: str, metrics: Mapping[str, Tensor | float], batch_size: int) -> None:
        """Log each metric as `stage/name`, averaged over processes."""
        for name, value in metrics.items():
            in_bar = name in PROGRESS_BAR_METRICS
            self.log(f"{stage}/{name}", value, batch_size=batch_size, prog_bar=in_bar, sync_dist=True)

    def log_evaluation(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation, including the one before the first step.

        Lightning discards values logged in the sanity check, so these go to the loggers directly.
        """
        if not self.trainer.sanity_checking:
            return self.log_metrics(stage, metrics, batch_size=1)
        self.first_metrics |= {f"{stage}/{name}" for name in metrics}
        for logger in self.trainer.loggers:
            logger.log_metrics({f"{stage}/{name}": value for name, value in metrics.items()}, step=0)
        return None
