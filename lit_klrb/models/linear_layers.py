"""Linear layers with another forward pass for the time of a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lit_klrb.functional.products import linear, onednn_is_quicker

# Minimum number of weights of a layer: with fewer, the overhead of a call exceeds what it saves.
LEAST_WEIGHTS = 1 << 16
# Layers of exactly these classes; Conv1D is GPT-2's, which stores the transpose.
LINEAR = nn.Linear, Conv1D
Product = Callable[[Tensor], Tensor]


@contextmanager
def quick_layers(model: nn.Module) -> Iterator[None]:
    """Compute float32 linear layers as in `lit_klrb.functional.products`, and so their backward passes.

    On devices other than CPUs, and under autocast, nothing changes.
    """
    with replaced_forward(_quick_products(model)):
        yield


def _quick_products(model: nn.Module) -> Iterator[tuple[Any, Product]]:
    layers: list[Any] = [layer for layer in model.modules() if type(layer) in LINEAR]
    for layer in layers if onednn_is_quicker() else ():
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        large = weight.device.type == "cpu" and weight.numel() >= LEAST_WEIGHTS
        if large and product_dtype(weight) == torch.float32:
            yield layer, partial(linear, weight=weight, bias=layer.bias)


@contextmanager
def replaced_forward(products: Iterator[tuple[Any, Product]]) -> Iterator[None]:
    """Replace the forward passes of layers in the block, except those that another library has replaced.

    Args:
        products: Layers, each with its forward pass in the block.
    """
    changed = []
    try:
        for layer, product in products:
            if "forward" not in vars(layer):  # accelerate, for one, replaces it on the instance
                layer.forward = product
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a CPU multiplies with a tensor: autocast's if that is enabled."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tensor.dtype
