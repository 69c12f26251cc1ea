"""Training in several processes (DDP, FSDP2): gathering the quantities that couple sequences.

Every process has its own prompts, and score weights are computed on the rollouts of all processes. Each
samples its slice of an evaluation and has the completions of all, so metrics need no reduction.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import pad

from lit_klrb.errors import ConfigurationError
from lit_klrb.files import PARTIAL
from lit_klrb.functional import TokenStats

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
# What ends a process that waits for another one.
LOST = "another process of this run has ended, or does not answer"


def world_size() -> int:
    """The number of processes that train together."""
    initialised = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialised else 1


def is_lost(error: BaseException) -> bool:
    """Whether an operation failed as another process has ended or does not answer.

    The errors of gloo have no class of their own, but begin with the place in its source.
    """
    in_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return world_size() > 1 and (in_gloo or isinstance(error, distributed.DistError))


def gather(value: T) -> list[T]:
    """The values of all processes, in the order of their ranks.

    Args:
        value: Any value that can be pickled, tensors on the CPU; all processes must make this call.

    Example:
        >>> gather(3)
        [3]
    """
    if world_size() == 1:
        return [value]
    parts: list[Any] = [None] * world_size()
    distributed.all_gather_object(parts, value)
    return parts


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all parts, padded with zeros to shape [sum of B, longest T].

    Example:
        >>> stacked([torch.tensor([[1, 2]]), torch.tensor([[3]])]).tolist()
        [[1, 2], [3, 0]]
    """
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])


def stacked_stats(parts: Sequence[TokenStats]) -> TokenStats:
    """Concatenate the statistics of all parts; fields that are None in the first part remain None."""
    fields: list[Any] = [None if field[0] is None else stacked(field) for field in zip(*parts, strict=True)]
    return TokenStats(*fields)


def gather_rows(tensor: Tensor) -> Tensor:
    """The rows of all processes, in the order of their ranks.

    Args:
        tensor: Shape [B] or [B, T]; smaller T are padded with zeros.

    Example:
        >>> gather_rows(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if world_size() == 1:
        return tensor
    parts = gather(tensor.cpu())
    return (torch.cat(parts) if tensor.ndim == 1 else stacked(parts)).to(tensor.device)


def own_rows(gathered: Tensor, like: Tensor) -> Tensor:
    """This process's rows of a tensor computed on gathered rows, of which each process has as many.

    Example:
        >>> own_rows(torch.tensor([[1, 2, 3]]), like=torch.zeros(1, 2)).tolist()
        [[1, 2]]
    """
    count, width = like.shape
    first = distributed.get_rank() * count if world_size() > 1 else 0
    return gathered[first : first + count, :width]


def share(count: int) -> tuple[slice, int]:
    """This process's slice of some rows, and how many of them are for `gather_rows`.

    It has at least one row, which is then not gathered: processes that divide a model run it together.

    Example:
        >>> share(3)
        (slice(0, 3, None), 3)
    """
    rank, size = (distributed.get_rank(), world_size()) if world_size() > 1 else (0, 1)
    first, last = count * rank // size, count * (rank + 1) // size
    return slice(first, max(last, first + 1)), last - first


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered from all processes if they hold a part each (a DTensor).

    Example:
        >>> whole(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()


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


def cluster_plugins() -> list[ClusterEnvironment]:
    """How processes of a SLURM job find each other; empty elsewhere, where Lightning decides.

    A job step that `srun` started has one process for each task. A batch script without it is one process,
    however many tasks the job has, and starts those of its devices itself. Requeueing is left to `Stops`.
    """
    if "SLURM_NTASKS" not in os.environ or TorchElasticEnvironment.detect():
        return []
    if not _in_a_step():
        return [LightningEnvironment()]
    tasks, nodes = (int(os.environ.get(f"SLURM_{name}", 1)) for name in ("NTASKS", "NNODES"))
    if tasks % nodes == 0:  # what --ntasks alone does not say
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(tasks // nodes))
    return [SLURMEnvironment(auto_requeue=False)]


def _in_a_step() -> bool:
    """Whether `srun` has started this process, with those of the other tasks."""
    return "SLURM_STEP_ID" in os.environ and SLURMEnvironment.job_name() not in ("bash", "interactive")


def check_started(trainer: L.Trainer) -> None:
    """Check that a launcher has started no more processes than train together: each would train alone."""
    number = trainer.num_devices * trainer.num_nodes
    variable = "WORLD_SIZE" if TorchElasticEnvironment.detect() else "SLURM_NTASKS" if _in_a_step() else ""
    if (started := int(os.environ.get(variable, 1))) > number:
        text = f"must give as many processes as the launcher started, {started}, got {number}"
        raise ConfigurationError(text, key="trainer.devices")


def check_strategy(trainer: L.Trainer) -> None:
    """Check that models are whole in each process, or divided by FSDP2."""
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, FSDP2)):
        raise ConfigurationError(
            f"{type(trainer.strategy).__name__} is not supported; use ddp, one device, or fsdp2 for models "
            "larger than a device",
            key="trainer.strategy",
        )
