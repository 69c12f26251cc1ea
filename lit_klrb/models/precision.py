"""Passes of a model under autocast, and whether a processor is faster or slower in bfloat16."""

import functools
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_klrb.models.sharding import is_sharded

# Rows, columns and inner size of the products: a layer of SmolLM2-135M on a small batch.
SHAPE = 256, 1536, 576
ROUNDS = 3
SDPA = "sdpa"


@contextmanager
def fast_autocast(model: PreTrainedModel) -> Iterator[None]:
    """Cast each weight once in the block instead of at each use and, on a CPU, attend in float32.

    Lightning's autocast keeps no copies of weights: one that was made without gradients must not be used by
    a pass with them. The copies of the block are freed at its end. Without autocast, nothing happens.

    Not for passes that the backward pass computes again, which is after the block.
    """
    device_type = model.device.type
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    # Autocast keeps copies only of weights that require gradients, which a pass without gradients ignores
    without = not torch.is_grad_enabled() and not is_sharded(model)
    frozen = [w for w in model.parameters() if without and not w.requires_grad and w.is_floating_point()]
    attention = ALL_ATTENTION_FUNCTIONS[SDPA]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        if device_type == "cpu":
            ALL_ATTENTION_FUNCTIONS[SDPA] = attention_in_float32
        with torch.autocast(device_type, torch.get_autocast_dtype(device_type), cache_enabled=True):
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
        ALL_ATTENTION_FUNCTIONS[SDPA] = attention
        torch.clear_autocast_cache()


def attention_in_float32(
    module: nn.Module, query: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention of transformers named sdpa, outside autocast.

    On a CPU, torch's kernel takes 2.6 times as long in bfloat16 as in float32 for 24 of 34 tokens, forward
    and backward, four times for the last of 34 forward, and as long for 512 (AMD EPYC with avx512_bf16).
    """
    with torch.autocast(query.device.type, enabled=False):
        precise = {name: _precise(option) for name, option in options.items()}
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, *map(_precise, (query, *others)), **precise
        )
        return attended


def _precise(argument: Any) -> Any:
    """Convert tensors of floating-point numbers to float32; return anything else unchanged."""
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.float()
    return argument


@functools.cache
def bfloat16_speed() -> float:
    """Products of matrices per second in bfloat16 relative to those in float32, on this processor.

    Processors without bfloat16 units convert every number and have a fifth of the speed; those with them have
    several times as much. It takes some milliseconds, once in a process.
    """
    return _seconds(torch.float32) / _seconds(torch.bfloat16)


def _seconds(dtype: torch.dtype) -> float:
    """The shortest time of a product over several rounds, as other load only adds to it."""
    rows, columns, inner = SHAPE
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    return min(timeit.repeat(lambda: left @ right, number=1, repeat=ROUNDS))


def slow_precision(precision: str, device: torch.device) -> str | None:
    """One line if a run in bfloat16 would be slower here than in float32; None otherwise.

    Args:
        precision: As `trainer.precision`, such as "bf16-mixed".
        device: The device of the model; only processors are measured.

    Example:
        >>> slow_precision("32-true", torch.device("cpu")) is None
        True
    """
    if not precision.startswith("bf16") or device.type != "cpu" or (speed := bfloat16_speed()) >= 1:
        return None
    return (
        f"trainer.precision: {precision} is slow on this processor: products of matrices in bfloat16 have "
        f"{speed:.2f} of the speed of float32; --trainer.precision 32-true is faster"
    )
