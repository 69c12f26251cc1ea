"""Rehearsals of a run: its models are built without weights, by the code that builds them in the run.

Within `rehearsing`, folders and hub ids become models on torch's meta device, from their configurations, and
checkpoints that a run of the same plan will write are what the rehearsal of that run has built. What needs
weights, such as the logits of a trial, is not asked.
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
from lit_klrb.models.folders import limited, size_of_folder
from lit_klrb.models.roles import Role


class UnknownModelError(Exception):
    """A model is not at hand yet, so that nothing that depends on it can be asked."""


class Made(NamedTuple):
    """What the checkpoint of a run will hold: a model, the name of its role, and its tokenizer."""

    role: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass
class Rehearsal:
    """A run that is set up without weights.

    Args:
        made: In a plan, what runs that were rehearsed before will write, by the path of their checkpoint;
            None for a run that would start now, for which models of the hub are read.

    Attributes:
        models: The models that the run loads, by argument.
    """

    made: dict[Path, Made] | None = None
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    def planned(self, path: str, is_local: bool) -> Made | None:
        """What a checkpoint will hold that is yet empty; None if the path names what is there.

        A path that is not local names a model of the hub.

        Raises:
            UnknownModelError: If neither is known.
        """
        file = Path(path).absolute()
        if self.made is None or (is_local and not (file.is_file() and file.stat().st_size == 0)):
            return None
        if file not in self.made:
            raise UnknownModelError(path)
        return self.made[file]._replace(model=deepcopy(self.made[file].model))


_current: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """Build models without weights inside the block."""
    token = _current.set(rehearsal)
    try:
        yield
    finally:
        _current.reset(token)


def current_rehearsal() -> Rehearsal | None:
    """The rehearsal in progress; None in a run."""
    return _current.get()


def without_weights(path: str, role: Role, settings: dict[str, Any]) -> PreTrainedModel:
    """The model of a folder's or a hub id's configuration, on torch's meta device."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, **settings)
    if config.model_type not in role.architectures:
        raise ConfigurationError(f"{config.model_type} is not the architecture of a {role.name}")
    if Path(path).is_dir() and not size_of_folder(Path(path)).bytes:
        raise ConfigurationError("it has no weights")
    with limited(path), torch.device("meta"):
        model: PreTrainedModel = role.auto_class.from_config(config, trust_remote_code=False)
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model
