"""Capability checks of a model on a few tokens: padding, and keys and values from a cache.

They compare logits instead of names, so that nothing depends on a list of architectures.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_klrb.models.sharding import is_sharded
from lit_klrb.terminal import say_once

# Largest difference of equal logits, relative to the largest logit, in float32 and better. Rounding makes it
# 5e-5 in SmolLM2 after some training; families of transformers that differ do so by 7e-3 at least. With a
# limit well between, a model's class and settings decide: a resumed run starts from other weights.
TOLERANCE = 1e-3
SHORT = torch.bfloat16, torch.float16
# The most tokens of a check: enough for small windows and for blocks that are read at once.
LENGTH = 16
# Tokens of padding before the second of two sequences, and the token: one whose embedding is not zero.
PADDING, PAD = 3, 7
# Tokens that are read one by one after the others, and how sequences are repeated before them.
STEPS, ROWS = 4, [1, 0, 1]
# The fewest tokens of a check.
SHORTEST = max(PADDING + 2, STEPS + 1)

# Names of the argument for cached keys and values: transformers 5.24 has renamed it.
CACHE_NAMES = ("cache", "past_key_values")
# The attribute of a model with the one of them with which it continues, which class and settings decide.
CONTINUES = "continues_with"


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Switch off dropout inside the block; the mode of each module is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute with float32 copies of weights that have 16 bits, of one block of layers at a time.

    The result of a check then does not depend on the dtype of the weights, whose rounding would hide
    differences. FSDP2 replaces the weights of each block in its passes: those of a sharded model stay.
    """
    weights = [] if is_sharded(model) else model.parameters()
    short = {weight: weight.data for weight in weights if weight.dtype in SHORT}
    blocks = [
        module for module in model.modules() if short and isinstance(module, GradientCheckpointingLayer)
    ]
    inside = {module for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in inside]
    always = {weight for module in outside for weight in module.parameters(recurse=False)}

    def widen(weights: Iterable[nn.Parameter]) -> None:
        for weight in short.keys() & {*weights}:
            weight.data = short[weight].float()

    def restore(weights: Iterable[nn.Parameter]) -> None:
        for weight in short.keys() & {*weights}:
            weight.data = short[weight]

    widen(always)
    hooks = [
        hook
        for block in blocks
        for hook in (
            block.register_forward_pre_hook(lambda block, _: widen({*block.parameters()} - always)),
            block.register_forward_hook(lambda block, *_: restore({*block.parameters()} - always)),
        )
    ]
    try:
        yield
    finally:
        restore(short)
        for hook in hooks:
            hook.remove()


@contextmanager
def full_precision_forward(model: PreTrainedModel) -> Iterator[None]:
    """Forward passes in float32, for checks: no autocast, neither the caller's nor accelerate's.

    accelerate's `prepare` wraps `forward` in autocast and returns float32, which a check would take for a
    model with other logits.
    """
    wrapped = model.forward
    original = vars(model).get("_original_forward")
    if original is not None:
        model.forward = original
    try:
        with torch.autocast(model.device.type, enabled=False), in_float32(model):
            yield
    finally:
        if original is not None:
            model.forward = wrapped


def has_weights(model: nn.Module) -> bool:
    """Whether a model's weights have values, which those on torch's meta device have not."""
    return not any(weight.is_meta for weight in model.parameters())


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions counted from the first token that is not padding, so that left padding has no effect.

    Example:
        >>> position_ids(torch.tensor([[0, 0, 1, 1]])).tolist()
        [[0, 0, 0, 1]]
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def key_value_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for a model's keys and values."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def agree(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits are equal up to rounding."""
    if logits.shape != expected.shape:
        return False
    dtype = expected.dtype
    if expected.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.bfloat16
    limit = max(TOLERANCE, 16 * torch.finfo(dtype).eps)
    difference = (logits.double() - expected.double()).abs().max()
    return bool(difference <= limit * expected.double().abs().max())


@torch.no_grad()
def reads_padding(model: PreTrainedModel) -> bool:
    """Whether padding on the left changes a model's logits."""
    tokens, mask = probe_tokens(model)
    alone = tokens[1:, PADDING:]
    padded = _logits(model, tokens, mask)[1:, PADDING:]
    return not agree(padded, _logits(model, alone, torch.ones_like(alone)))


def continues(model: PreTrainedModel) -> bool:
    """Whether a model gives the same logits after cached keys and values as after whole sequences."""
    return cache_name(model) is not None


@torch.no_grad()
def cache_name(model: PreTrainedModel) -> str | None:
    """The argument with which a model continues from cached keys and values; None if it cannot."""
    if CONTINUES not in vars(model):
        setattr(model, CONTINUES, None)
        # The signature says only which name to try first: a model may pass either on to its parts
        known = inspect.signature(model.forward).parameters
        for name in sorted(CACHE_NAMES, key=lambda name: name not in known):
            # Caches of their own raise all kinds of exceptions
            with full_precision_forward(model), suppress(Exception):
                if _continues_on_probe(model, name):
                    setattr(model, CONTINUES, name)
                    break
        else:
            say_once(
                f"a {model.config.model_type} model does not continue from cached keys and values: it reads "
                "the whole sequence again for each sampled token, and equal prompts one by one"
            )
    argument: str | None = getattr(model, CONTINUES)
    return argument


def continuing(model: PreTrainedModel, cache: DynamicCache | None) -> dict[str, Any]:
    """Keyword arguments of a forward pass with a cache, or without one."""
    name = None if cache is None else cache_name(model)
    return {"use_cache": False} if name is None else {name: cache, "use_cache": True}


def _continues_on_probe(model: PreTrainedModel, name: str) -> bool:
    tokens, mask = probe_tokens(model)
    rows = torch.tensor(ROWS, device=model.device)
    prompt = tokens.shape[1] - STEPS
    expected = _logits(model, tokens, mask)[rows, prompt:]
    cache, start, steps = key_value_cache(model), 0, []
    states = {name: cache, "use_cache": True}
    for stop in range(prompt, tokens.shape[1] + 1):
        logits = _logits(model, tokens, mask, start, stop, states)
        if start:
            steps.append(logits[:, -1])
        else:
            cache.reorder_cache(rows)  # type: ignore[arg-type]
            tokens, mask = tokens[rows], mask[rows]
        start = stop
    return agree(torch.stack(steps, 1), expected)


def probe_tokens(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Two sequences of tokens for checks, and their masks, shape [2, N]; the second is padded."""
    words: Any = model.get_input_embeddings()
    # Some architectures reserve two positions
    positions = (getattr(model.config, "max_position_embeddings", None) or LENGTH + 2) - 2
    tokens = torch.arange(max(SHORTEST, min(LENGTH, positions)), device=model.device)
    tokens = torch.stack([tokens, tokens.flip(0)])
    tokens[1, :PADDING] = PAD
    mask = torch.ones_like(tokens)
    mask[1, :PADDING] = 0
    return tokens % words.weight.shape[0], mask


def _logits(
    model: PreTrainedModel,
    tokens: Tensor,
    mask: Tensor,
    start: int = 0,
    stop: int | None = None,
    states: dict[str, Any] | None = None,
) -> Tensor:
    logits: Tensor = model(
        input_ids=tokens[:, start:stop],
        attention_mask=mask[:, :stop],
        position_ids=position_ids(mask)[:, start:stop],
        **(states or {"use_cache": False}),
    ).logits
    return logits
