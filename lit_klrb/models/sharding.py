"""Models larger than one device: FSDP2 of torch, which divides each weight among the processes.

Every process runs every forward pass, as each gathers a block's weights from all processes and frees them
afterwards. Numbers of passes must therefore not depend on a process's own data.
"""

import io
import pickle
import warnings
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_klrb.distributed import world_size
from lit_klrb.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The method of a sharded model that runs its backbone alone.
RUN_BACKBONE = "run_backbone"

T = TypeVar("T")


class _WithoutWeights(pickle.Pickler):
    """Writes models whose weights are on torch's meta device; buffers, such as frequencies, have numbers."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return nn.Parameter, (value.detach().to("meta"), value.requires_grad)
        return NotImplemented


def of_first(make: Callable[[], T]) -> T:
    """What the first process makes, which alone reads files; weights are on the meta device in the others.

    All processes must make this call. An error ends all of them; the first one says it.

    Example:
        >>> of_first(lambda: 3)
        3
    """
    if world_size() == 1:
        return make()
    first = distributed.get_rank() == 0
    sent: list[Any] = [None, None]  # what is made, and the error
    if first:
        try:
            made, file = make(), io.BytesIO()
            _WithoutWeights(file).dump(made)
            sent[0] = file.getvalue()
        except Exception as error:
            sent[1] = error
    distributed.broadcast_object_list(sent)
    content, problem = sent
    if problem is not None:
        problem.is_echo = not first
        raise problem
    return made if first else pickle.loads(content)


def shard(model: PreTrainedModel, mesh: "DeviceMesh") -> None:
    """Divide the weights of the first process's model among all, in place, unless that is done.

    The weights of one block at a time are gathered. Those outside the blocks, such as embeddings and head,
    stay gathered from a forward pass to the end of the backward pass, as the tiled operations read the head;
    those of a frozen model for the pass alone.

    Raises:
        ConfigurationError: If the model has no blocks.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    if is_sharded(model):
        return
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ConfigurationError(
            f"fsdp2 does not support {type(model).__name__}, which has no blocks to shard; use ddp",
            key="trainer.strategy",
        )
    # Outputs that are views would matter for operations in place, of which there are none
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    whole = {name: weight.detach() for name, weight in model.named_parameters()}
    for block in blocks:
        fully_shard(block, mesh=mesh)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    fully_shard(model, mesh=mesh, reshard_after_forward=not trained)
    left: dict[Any, Tensor] = {part: whole.pop(name) for name, part in model.named_parameters()}

    def received(tensor: Any) -> Tensor:
        """This process's part of a weight; buffers and weights seen before are returned unchanged."""
        if tensor not in left:
            return tensor
        weight = left.pop(tensor)
        if weight.is_meta:
            weight = torch.empty_like(weight, device=mesh.device_type)  # takes no memory until it is written
        return distribute_tensor(weight, mesh, tensor.placements)

    model._apply(received)
    setattr(model, RUN_BACKBONE, MethodType(_run_backbone, model))
    register_fsdp_forward_method(model, RUN_BACKBONE)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` divided the model."""
    return hasattr(model, RUN_BACKBONE)


def agreed(model: PreTrainedModel, condition: Tensor) -> bool:
    """Whether a condition is true, for a sharded model in all processes.

    Args:
        model: The model whose next forward pass depends on the condition.
        condition: One truth value.
    """
    if is_sharded(model):
        condition = condition.to(torch.uint8)
        distributed.all_reduce(condition, distributed.ReduceOp.MIN)
    return bool(condition)


def _run_backbone(model: PreTrainedModel, **inputs: Any) -> Any:
    return model.base_model(**inputs)
