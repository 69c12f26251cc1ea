"""Passes of a model under autocast, without the work that autocast alone repeats."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_klrb.models.sharding import is_sharded

SDPA = "sdpa"


@contextmanager
def fast_autocast(model: PreTrainedModel) -> Iterator[None]:
    """Cast each weight once in the block instead of at each use and, on a CPU, attend in float32.

    Lightning's autocast keeps no copies of weights: one that was made without gradients must not be used by
    a pass with them. The copies of the block are freed at its end. Without autocast, nothing happens.

    Not for passes that the backward pass computes again, which is after the block.
    """
    kind = model.device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    # Autocast keeps copies only of weights that require gradients, which a pass without gradients ignores
    without = not torch.is_grad_enabled() and not is_sharded(model)
    frozen = [w for w in model.parameters() if without and not w.requires_grad and w.is_floating_point()]
    attention = ALL_ATTENTION_FUNCTIONS[SDPA]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        if kind == "cpu":
            ALL_ATTENTION_FUNCTIONS[SDPA] = attention_in_float32
        with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=True):
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
    """The argument; in float32 if it is a tensor of floating-point numbers."""
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.float()
    return argument
