"""FSDP2 of torch as a strategy of Lightning, with checkpoints of one file."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_klrb.distributed.gathering import whole
from lit_klrb.files import PARTIAL

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDP2(ModelParallelStrategy):
    """FSDP2 of torch, which divides each weight among all processes: `--trainer.strategy fsdp2`.

    The first process builds the models, and sends the others their structure and each its part of a weight at
    a time, so that one of them holds one whole copy. A checkpoint is one file, as of other strategies. The
    first process writes it, and gathers a weight at a time, which it keeps in a file without a name on the
    same disk.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1)

    def setup_environment(self) -> None:
        """See Lightning's; the number of processes is known now."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    # This process's part of weights and moments; numbers of weights are those of other strategies
    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    optimizer_state = ParallelStrategy.optimizer_state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; all processes must make this call."""
        path = Path(self.broadcast(filepath))
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = partial(self._stored, folder=path.parent)
        weights = {name: stored(weight) for name, weight in checkpoint["state_dict"].items()}
        optimizers = [
            _with_moments(state, lambda _, v: stored(v)) for state in checkpoint.get("optimizer_states", [])
        ]
        checkpoint = {**checkpoint, "state_dict": weights, "optimizer_states": optimizers}
        ParallelStrategy.save_checkpoint(self, checkpoint, path, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore this process's part of weights and moments, and return what else the checkpoint holds."""
        optimizers = self.optimizers
        self.optimizers = []  # Lightning's own numbers their weights in another way
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.optimizers = optimizers
        for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(_with_moments(state, partial(_as_part, parameters)))
        return checkpoint

    def _stored(self, part: Tensor, folder: Path) -> Tensor | None:
        """A whole tensor in a file; None beside the first process."""
        tensor = whole(part)
        _trim_heap()
        if not self.is_global_zero:
            return None
        if tensor is part:  # each process has all of it
            return tensor.cpu()
        with NamedTemporaryFile(dir=folder, prefix=".weight.", suffix=PARTIAL) as file:
            stored = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return stored.view(tensor.shape).copy_(tensor)


def _trim_heap() -> None:
    """Return freed memory to the system, of which glibc keeps more with each tensor that is gathered."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _with_moments(state: dict[str, Any], change: Callable[[int, Tensor], Tensor | None]) -> dict[str, Any]:
    """The state of an optimizer with other moments, by a function of the weight's number and the moment."""
    moments = {
        number: {name: change(number, value) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": moments}


def _as_part(parameters: list[DTensor], number: int, moment: Tensor) -> Tensor:
    """This process's part of a moment, as of its parameter; the count of steps is whole everywhere."""
    parameter = parameters[number]
    if moment.shape != parameter.shape:
        return moment
    moment = moment.to(parameter.device)
    return distribute_tensor(moment, parameter.device_mesh, parameter.placements, src_data_rank=None)


StrategyRegistry.register("fsdp2", FSDP2, description=FSDP2.__doc__, override=True)


def sharding_mesh(trainer: L.Trainer) -> "DeviceMesh | None":
    """The processes among which models are divided, one dimension; None if each process holds them whole."""
    strategy = trainer.strategy
    return strategy.device_mesh["data_parallel"] if isinstance(strategy, FSDP2) else None
