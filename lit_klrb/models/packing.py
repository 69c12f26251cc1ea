"""Linear layers whose products on a CPU are computed by oneDNN, for the time of a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lit_klrb.functional.products import linear, onednn_is_quicker
from lit_klrb.models.adapters import adapted_weights
from lit_klrb.models.sharding import is_sharded
from lit_klrb.terminal import say_once

# Least number of a layer's weights: products with fewer take no longer than what would be added to them.
LEAST_WEIGHTS = 1 << 16
# Least number of passes: ordering a layer's weights takes as long as two to four passes save.
LEAST_PASSES = 8
PRECISIONS = torch.float32, torch.bfloat16
# Layers of these classes exactly; those of GPT-2 store the transpose.
LINEAR = nn.Linear, Conv1D
Product = Callable[[Tensor], Tensor]


@contextmanager
def packed_weights(model: PreTrainedModel, rows: int, passes: int) -> Iterator[None]:
    """Products with copies of the weights that oneDNN has ordered once, instead of in each product.

    For passes without gradients and with few rows, as in sampling: those of SmolLM2 with 32 rows take half of
    the time in float32 (AMD EPYC, where MKL computes them otherwise; on an Intel processor with AMX only
    adapters gain). The copies have autocast's precision if that is on. A LoRA adapter is merged into them:
    its layers are one product. The weights are not touched, and the copies are freed at the end of the block.
    On other devices nothing happens.

    In bfloat16 the merge rounds once more: for 24 tokens of SmolLM2 with two random adapters, the KL of
    sampler and policy is 0.023 nats with it, 0.014 without (`python -m benchmarks sampling`).

    Args:
        model: The model; blocks that processes share are left as they are.
        rows: Number of tokens that a pass reads, for which the order is best.
        passes: Number of passes; with few of them the weights stay as they are.
    """
    if model.device.type != "cpu" or passes < LEAST_PASSES or is_sharded(model):
        yield
        return
    with _replaced(_packed(model, rows)):
        yield


def _packed(model: PreTrainedModel, rows: int) -> Iterator[tuple[Any, Product]]:
    for layer, base, weight in _weights(model):
        dtype = _precision(weight)
        if type(base) in LINEAR and dtype in PRECISIONS and weight.numel() >= LEAST_WEIGHTS:
            try:
                yield layer, _product(layer.forward, base, weight.to(dtype), rows)
            except (RuntimeError, AttributeError) as error:
                reason = str(error).partition("\n")[0]
                say_once(f"sampling takes longer, as weights are not ordered for it: {reason}")
                return


@contextmanager
def quick_layers(model: nn.Module) -> Iterator[None]:
    """Linear layers in float32 as in `lit_klrb.functional.products`; backward passes after the block too.

    On other devices, and under autocast, nothing happens.
    """
    with _replaced(_quick(model)):
        yield


def _quick(model: nn.Module) -> Iterator[tuple[Any, Product]]:
    layers: list[Any] = [layer for layer in model.modules() if type(layer) in LINEAR]
    for layer in layers if onednn_is_quicker() else ():
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        large = weight.device.type == "cpu" and weight.numel() >= LEAST_WEIGHTS
        if large and _precision(weight) == torch.float32:
            yield layer, partial(linear, weight=weight, bias=layer.bias)


@contextmanager
def _replaced(products: Iterator[tuple[Any, Product]]) -> Iterator[None]:
    """Layers with other forward passes in the block, except where another library has replaced them."""
    changed = []
    try:
        for layer, product in products:
            if "forward" not in vars(layer):  # as accelerate's
                layer.forward = product
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _precision(tensor: Tensor) -> torch.dtype:
    """In which a product with a tensor is computed: autocast's precision if that is on."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tensor.dtype


def _weights(model: PreTrainedModel) -> Iterator[tuple[Any, Any, Any]]:
    """Layers to replace, the linear layers that they are or adapt, and the weights with any adapter's."""
    adapted = set()
    for layer, weight in adapted_weights(model):
        base = layer.get_base_layer()
        adapted.add(base)
        yield layer, base, weight
    for module in model.modules():
        if type(module) in LINEAR and module not in adapted:
            yield module, module, module.weight


def _product(forward: Product, base: Any, weight: Tensor, rows: int) -> Product:
    """What takes the place of a layer's forward pass, where that is in the precision of the weight."""
    operations: Any = torch.ops.mkldnn
    dtype = weight.dtype
    transposed = weight if isinstance(base, nn.Linear) else weight.T
    ordered = operations._reorder_linear_weight(transposed.contiguous(), rows)
    bias = None if base.bias is None else base.bias.to(dtype)

    def product(inputs: Tensor) -> Tensor:
        if _precision(inputs) != dtype:  # a layer that the model computes without autocast
            return forward(inputs)
        result: Tensor = operations._linear_pointwise(inputs.to(dtype), ordered, bias, "none", [], "")
        return result

    return product
