"""Dry runs: models are built without weights, by the code that builds them in a run.

Within `dry_running`, folders and hub ids become models on torch's meta device, from their configurations. A
checkpoint that an earlier run of the same plan will write is the model that its dry run has built.
What needs weights, such as the logits of a capability check, is skipped.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError
from lit_klrb.models.folders import has_weight_files
from lit_klrb.models.roles import Role


class UnknownModelError(Exception):
    """A model does not exist yet, so nothing that depends on it can be checked."""


class PlannedModel(NamedTuple):
    """What the checkpoint of a run will hold: a model, the name of its role, and its tokenizer."""

    role: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass
class DryRun:
    """A run that is set up without weights.

    Args:
        planned_models: In a plan, the models that earlier runs will write, by the path of their checkpoint;
            None for a run that would start now, for which models of the hub are read.

    Attributes:
        models: The models that the run loads, by argument.
    """

    planned_models: dict[Path, PlannedModel] | None = None
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    def planned(self, path: str, is_local: bool) -> PlannedModel | None:
        """What a checkpoint will hold that is yet empty; None if the path names what is there.

        A path that is not local names a model of the hub.

        Raises:
            UnknownModelError: If neither is known.
        """
        file = Path(path).absolute()
        if self.planned_models is None or (is_local and not (file.is_file() and file.stat().st_size == 0)):
            return None
        if file not in self.planned_models:
            raise UnknownModelError(path)
        return self.planned_models[file]._replace(model=deepcopy(self.planned_models[file].model))


_current: ContextVar[DryRun | None] = ContextVar("dry_run", default=None)


@contextmanager
def dry_running(dry_run: DryRun) -> Iterator[None]:
    """Build models without weights inside the block."""
    token = _current.set(dry_run)
    try:
        yield
    finally:
        _current.reset(token)


def current_dry_run() -> DryRun | None:
    """The dry run in progress; None in a run."""
    return _current.get()


def without_weights(path: str, role: Role, settings: dict[str, Any]) -> PreTrainedModel:
    """The model of a folder's or a hub id's configuration, on torch's meta device."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, **settings)
    if config.model_type not in role.architectures:
        raise ConfigurationError(f"{config.model_type} is not the architecture of a {role.name}")
    if Path(path).is_dir() and not has_weight_files(Path(path)):
        raise ConfigurationError("it has no weights")
    with torch.device("meta"):
        model: PreTrainedModel = role.auto_class.from_config(config, trust_remote_code=False)
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model
