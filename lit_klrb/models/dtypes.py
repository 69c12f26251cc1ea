"""The dtype of each weight, by `trainer.precision`: one rule for all stages, whatever the model's file has.

| precision | trained weights, their optimizer's moments | frozen: reference, teacher, reward, LoRA's base |
|---|---|---|
| 32-true | float32 | float32 |
| bf16-mixed, 16-mixed | float32 | the file's, where that changes no number; else float32 |
| bf16-true, 16-true, 64-true | that of the precision | that of the precision |

Mixed precision rounds the weight of each matrix product. One that its file has rounded already gives the same
product, bit for bit, in half the memory. So the KL of a model to itself is exactly 0, whatever its file has.
"""

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lit_klrb.errors import ConfigurationError
from lit_klrb.models.capabilities import SHORT, eval_mode, has_weights, in_float32, probe_tokens
from lit_klrb.seeding import forked_rng

TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# Layers of these classes exactly: autocast rounds the weights of products, and what an embedding looks up is
# converted by a hook.
ROUNDED = nn.Linear, Conv1D, nn.Embedding


def trained_dtype(precision: str) -> torch.dtype:
    """The dtype of trained weights and of their optimizer's moments."""
    return TRUE.get(precision, torch.float32)


def computing_dtype(precision: str) -> torch.dtype:
    """The dtype of matrix products.

    Example:
        >>> computing_dtype("bf16-mixed"), computing_dtype("32-true")
        (torch.bfloat16, torch.float32)
    """
    return MIXED.get(precision, trained_dtype(precision))


def set_dtypes(model: PreTrainedModel, precision: str) -> None:
    """Give each weight of a model its dtype, in place; weights without gradients are frozen ones.

    Args:
        model: The model, with any adapter.
        precision: As `trainer.precision`, such as "bf16-mixed".
    """
    kept, dtype = _rounded_already(model) if precision in MIXED else set(), trained_dtype(precision)
    if has_weights(model) and any(weight.dtype != dtype for weight in model.parameters()):
        _convert_buffers(model, dtype)
    convert(model, dtype, kept)
    if not kept:
        return
    for module in model.modules():
        if type(module) is nn.Embedding and _look_up not in module._forward_hooks.values():
            module.register_forward_hook(_look_up)
    if has_weights(model) and not _same_numbers(model, MIXED[precision]):
        convert(model, torch.float32)


def convert(model: nn.Module, dtype: torch.dtype, kept: Collection[nn.Parameter] = ()) -> None:
    """Convert all weights of a model in place, except some."""
    for weight in model.parameters():
        if weight.is_floating_point() and weight not in kept:
            weight.data = weight.data.to(dtype)


def _convert_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model the buffers with which transformers makes it for weights of a dtype, in place.

    Some are rounded to that dtype and in no file, such as Gemma's scale of embeddings: a run from a file in
    bfloat16 would else differ from the same run resumed.
    """

    def on_meta(module: nn.Module, name: str, weight: Tensor | None) -> nn.Parameter | None:
        return None if weight is None else nn.Parameter(weight.to("meta"))

    hook: Any = on_meta
    with forked_rng(0), registration.register_module_parameter_registration_hook(hook):
        made = dict(type(model)._from_config(copy.deepcopy(model.config), dtype=dtype).named_buffers())
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in made and buffer.dtype != made[name].dtype:
            buffer.data = (buffer if name in stored else made[name]).data.to(buffer.device, made[name].dtype)


def _rounded_already(model: PreTrainedModel) -> set[nn.Parameter]:
    """Frozen weights that are used by `ROUNDED` layers alone, and have no more digits than 16 bits hold.

    Those of a checkpoint are float32: they are converted to the dtype of the model's file where it holds them
    exactly, as it does an adapter's base.
    """
    weights = {weight for weight in model.parameters() if not weight.requires_grad}
    for module in model.modules():
        if type(module) not in ROUNDED:
            weights -= {*module.parameters(recurse=False)}
    if (file := file_dtype(model)) in SHORT and has_weights(model):
        for weight in weights:
            if weight.dtype == torch.float32 and torch.equal(weight.to(file).float(), weight):
                weight.data = weight.data.to(file)
    return {weight for weight in weights if weight.dtype in SHORT}


def _look_up(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """An embedding's output, converted to float32 under autocast, as later layers add to it in float32."""
    return output.float() if torch.is_autocast_enabled(output.device.type) else output


@torch.no_grad()
def _same_numbers(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether a model computes, under autocast, bit for bit what it does with all weights in float32."""
    tokens, mask = probe_tokens(model)
    settings: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    # Layers that autocast does not know raise errors of all kinds
    with eval_mode(model), suppress(Exception), torch.autocast(model.device.type, dtype, cache_enabled=False):
        logits = model(**settings).logits
        with in_float32(model):
            return torch.equal(logits, model(**settings).logits)
    return False


class Rounding(NamedTuple):
    """What rounding does to trained weights.

    Args:
        changed: Number of weights that get another value.
        moved: Number of weights that training has moved; 0 if their values before it are not known.
        lost: Number of those that get their old value back: they moved by less than half a unit in the last
            place.
    """

    changed: int
    moved: int
    lost: int


@torch.no_grad()
def rounding(model: nn.Module, dtype: torch.dtype, before: Mapping[str, Tensor]) -> Rounding:
    """What a conversion of a model's weights to a dtype would do.

    Args:
        model: The model.
        dtype: The dtype.
        before: The weights before training, by name; may be empty.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> layer.weight.data = torch.tensor([[1.001, 1.01]])
        >>> rounding(layer, torch.bfloat16, {"weight": torch.ones(1, 2)})
        Rounding(changed=2, moved=2, lost=1)

    Raises:
        ConfigurationError: If the dtype's range does not hold a weight.
    """
    counts = []
    for name, weight in model.named_parameters():
        rounded, old = weight.to(dtype), before.get(name)
        if old is None or old.shape != weight.shape:
            old = weight
        if not rounded.isfinite().all():
            raise ConfigurationError(f"{_name(dtype)} does not hold the weight {name}", key="dtype")
        moved = weight != old
        masks = rounded.to(weight.dtype) != weight, moved, moved & (rounded == old.to(dtype))
        counts.append([int(mask.sum()) for mask in masks])
    return Rounding(*map(sum, zip(*counts, strict=True)))


def summary(models: Mapping[str, PreTrainedModel], precision: str) -> str:
    """One line on the dtypes of models, by name.

    Example:
        >>> summary({}, "bf16-true")
        'computed in bfloat16; updates smaller than 1/256 of a weight are lost'
    """
    computed = computing_dtype(precision)
    line = "".join(f"{name} {_described(model)}, " for name, model in models.items())
    line += f"computed in {_name(computed)}"
    if trained_dtype(precision) in SHORT:  # half of the distance of neighbouring numbers, at most
        line += f"; updates smaller than 1/{2 / torch.finfo(computed).eps:.0f} of a weight are lost"
    return line


def _described(model: PreTrainedModel) -> str:
    """The dtype of most of a model's weights, that of an adapter, and that of the file if it differs."""
    sizes: dict[bool, Counter[torch.dtype]] = {True: Counter(), False: Counter()}
    for weight in model.parameters():
        sizes[weight.requires_grad][weight.dtype] += weight.numel()
    trained, frozen = ([_name(dtype) for dtype, _ in sizes[key].most_common(1)] for key in (True, False))
    file = file_dtype(model)
    own = "".join(frozen or trained)
    about = f"{own} with an adapter in {trained[0]}" if trained and frozen else own
    return about if file is None or _name(file) == own else f"{about} (file: {_name(file)})"


def file_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """The dtype of the file from which a model came, through any number of runs; None if it was new."""
    dtype: torch.dtype | str | None = getattr(model.config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
