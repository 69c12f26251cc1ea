"""Modules whose checkpoints are self-contained: weights, configuration, tokenizer, adapter, end tokens."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.encode import end_tokens
from lit_klrb.distributed import sharding_mesh
from lit_klrb.models import loading
from lit_klrb.models.adapters import adapter_settings
from lit_klrb.models.sharding import of_first
from lit_klrb.run.checkpoints import check_intact, check_resumable
from lit_klrb.run.lightning_internals import trainer_of

# Frozen models, which checkpoints omit.
REFERENCE_PREFIXES = "reference.", "first_reference."


def check_file(key: str, path: Any) -> None:
    """Check a checkpoint that Lightning reads, which ignores its checksums."""
    if isinstance(path, str | os.PathLike) and "://" not in str(path):
        with loading.reading(key, os.fspath(path)) as local:
            check_intact(Path(local))


class CheckpointedModule(L.LightningModule, ABC):
    """A module that builds its model from settings or from a checkpoint, and writes self-contained ones."""

    # The role of the trained model, which names the attribute that holds it.
    role: ClassVar[loading.Role]
    tokenizer: PreTrainedTokenizerBase
    # The checkpoint to be restored. The command line sets it, as Lightning passes it to a module only after
    # `configure_model`.
    ckpt_path: str | None = None
    # The step of the policy that the checkpoint holds
    _policy_step = 0

    @abstractmethod
    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model to train, and its tokenizer."""

    @property
    def trained(self) -> PreTrainedModel:
        """The trained model."""
        model: PreTrainedModel = getattr(self, self.role.name)
        return model

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Lightning's `load_from_checkpoint`, after a check of the file's checksums.

        Raises:
            ConfigurationError: If it is damaged, or not there.
        """
        check_file("checkpoint_path", checkpoint_path)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def build_models(self) -> None:
        """Build the model, or load it from the checkpoint to resume from, unless it is already loaded."""
        if hasattr(self, self.role.name):
            return
        if self.ckpt_path is not None:
            with loading.reading("ckpt_path", self.ckpt_path) as local:
                self._take(loading.read_checkpoint(local, self.role))
        else:
            model, self.tokenizer = self.build()
            setattr(self, self.role.name, model)

    def _take(self, checkpoint: dict[str, Any]) -> None:
        """Take model and tokenizer from a checkpoint."""
        setattr(self, self.role.name, loading.model_from_checkpoint(checkpoint, self.role))
        self.tokenizer = loading.tokenizer_from_files(checkpoint.get(loading.TOKENIZER_KEY))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what makes the checkpoint self-contained: configuration, tokenizer, adapter, end tokens."""
        checkpoint[self.role.config_key] = loading.config_dict(self.trained)
        checkpoint[loading.TOKENIZER_KEY] = loading.tokenizer_files(self.tokenizer)
        checkpoint[loading.ADAPTER_KEY] = adapter_settings(self.trained)
        if self.role == loading.POLICY:
            checkpoint[loading.END_TOKENS_KEY] = list(end_tokens(self.tokenizer, self.trained))

    @property
    def evaluated_step(self) -> int:
        """The step of the policy that an evaluation is of: in a run its own, otherwise the checkpoint's."""
        trainer = trainer_of(self)
        running = trainer is None or trainer.state.fn == TrainerFn.FITTING
        return self.global_step if running else self._policy_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build model and tokenizer from the checkpoint, unless `configure_model` did."""
        trainer = trainer_of(self)
        if trainer is not None:
            of_first(partial(check_file, "ckpt_path", trainer.ckpt_path))
            self._policy_step = int(checkpoint.get("global_step", 0))
            # Where models are divided, weights are restored before, and no part of what is passed here
            if trainer.state.fn == TrainerFn.FITTING and sharding_mesh(trainer) is None:
                check_resumable(str(trainer.ckpt_path), checkpoint)
        if not hasattr(self, self.role.name):
            self._take(checkpoint)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The trained weights, without the frozen reference."""
        state = super().state_dict(*args, **kwargs)
        return {key: value for key, value in state.items() if not key.startswith(REFERENCE_PREFIXES)}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """The inverse of `state_dict`: the reference keeps its weights, all other keys must match."""
        # Inserting the reference's current weights, which checkpoints omit, keeps loading strict
        reference = {k: v for k, v in super().state_dict().items() if k.startswith(REFERENCE_PREFIXES)}
        return super().load_state_dict({**state_dict, **reference}, strict=strict, assign=assign)

    def on_train_end(self) -> None:
        """Keep the step of the policy, for evaluations that follow."""
        self._policy_step = self.global_step
