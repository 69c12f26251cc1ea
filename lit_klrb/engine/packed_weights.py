"""Packed weights: copies of linear layers' weights in oneDNN's blocked layout, for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_klrb.models.adapters import adapted_weights
from lit_klrb.models.linear_layers import LEAST_WEIGHTS, LINEAR, Product, product_dtype, replaced_forward
from lit_klrb.models.sharding import is_sharded
from lit_klrb.terminal import say_once

# Minimum number of forward passes: packing a layer's weights costs as much as two to four passes save.
LEAST_PASSES = 8
DTYPES = torch.float32, torch.bfloat16


@contextmanager
def packed_weights(model: PreTrainedModel, batch_size: int, passes: int) -> Iterator[None]:
    """Multiply with packed copies of the weights, which oneDNN would otherwise reorder in each product.

    For passes without gradients on few tokens, as in sampling: the products of SmolLM2 on 32 tokens take half
    of the time in float32 (AMD EPYC, where MKL computes them otherwise; on an Intel processor with AMX only
    adapters gain). The copies have autocast's dtype if that is enabled. A LoRA adapter is merged into them,
    so that its layer is one product. The weights are not changed, and the copies are freed after the block.
    On devices other than CPUs nothing changes.

    In bfloat16 the merge rounds once more: for 24 tokens of SmolLM2 with two random adapters, the KL of
    sampler and policy is 0.023 nats with it, 0.014 without (`python -m benchmarks sampling`).

    Args:
        model: The model; one that is sharded over processes is left as it is.
        batch_size: Number of tokens per forward pass, for which the layout is chosen.
        passes: Number of forward passes; with few of them the weights are not packed.
    """
    if model.device.type != "cpu" or passes < LEAST_PASSES or is_sharded(model):
        yield
        return
    with replaced_forward(_packed_products(model, batch_size)):
        yield


def _packed_products(model: PreTrainedModel, batch_size: int) -> Iterator[tuple[Any, Product]]:
    for layer, base, weight in _merged_weights(model):
        dtype = product_dtype(weight)
        if type(base) in LINEAR and dtype in DTYPES and weight.numel() >= LEAST_WEIGHTS:
            try:
                yield layer, _packed_product(layer.forward, base, weight.to(dtype), batch_size)
            except (RuntimeError, AttributeError) as error:
                reason = str(error).partition("\n")[0]
                say_once(f"weights are not packed for sampling, which takes longer: {reason}")
                return


def _merged_weights(model: PreTrainedModel) -> Iterator[tuple[Any, Any, Any]]:
    """Layers, the linear layers that they are or adapt, and the weights with any adapter merged."""
    adapted = set()
    for layer, weight in adapted_weights(model):
        base = layer.get_base_layer()
        adapted.add(base)
        yield layer, base, weight
    for module in model.modules():
        if type(module) in LINEAR and module not in adapted:
            yield module, module, module.weight


def _packed_product(forward: Product, base: Any, weight: Tensor, batch_size: int) -> Product:
    """A layer's forward pass with packed weights, for inputs that are multiplied in the weights' dtype."""
    operations: Any = torch.ops.mkldnn
    dtype = weight.dtype
    transposed = weight if isinstance(base, nn.Linear) else weight.T
    packed = operations._reorder_linear_weight(transposed.contiguous(), batch_size)
    bias = None if base.bias is None else base.bias.to(dtype)

    def product(inputs: Tensor) -> Tensor:
        if product_dtype(inputs) != dtype:  # a layer that the model computes outside autocast
            return forward(inputs)
        result: Tensor = operations._linear_pointwise(inputs.to(dtype), packed, bias, "none", [], "")
        return result

    return product
