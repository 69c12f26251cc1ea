"""Models larger than one device: FSDP2 of torch, which divides each weight among the processes.

Every process runs every forward pass, as each gathers a block's weights from all processes and frees them
afterwards. Numbers of passes must therefore not depend on a process's own data.
"""

import warnings
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_klrb.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The method of a sharded model that runs its backbone alone.
RUN_BACKBONE = "run_backbone"


def shard(model: PreTrainedModel, mesh: "DeviceMesh") -> None:
    """Divide the weights of a model among processes, in place, unless that is done.

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
    for block in blocks:
        fully_shard(block, mesh=mesh)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    fully_shard(model, mesh=mesh, reshard_after_forward=not trained)
    setattr(model, RUN_BACKBONE, MethodType(_run_backbone, model))
    register_fsdp_forward_method(model, RUN_BACKBONE)


def is_sharded(model: PreTrainedModel) -> bool:
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
