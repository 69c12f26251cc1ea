"""Decoding token by token: with a KV cache, with static buffers, or with CUDA graphs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lit_klrb.engine.cache_layers import PreallocatedLayer, StaticLayer
from lit_klrb.models.capabilities import (
    agree,
    continues,
    continuing,
    full_precision_forward,
    key_value_cache,
    position_ids,
    probe_tokens,
)
from lit_klrb.models.sharding import is_sharded
from lit_klrb.terminal import say_once

# Minimum number of tokens for which a CUDA graph is captured: a capture costs about two forward passes.
LEAST_CAPTURED = 4
# Attribute of a model: whether its forward passes can be captured, which its class and settings decide.
CAPTURES = "captures_graphs"
# The last graph of each device: the next one shares its memory pool, which would otherwise stay allocated.
_LAST_GRAPH: dict[torch.device, torch.cuda.CUDAGraph] = {}


class Decoder:
    """Next-token logits of a batch of sequences that grow by one token at a time.

    With a KV cache each token is read once; a model without one reads whole sequences for each token.

    Args:
        model: The model.
        prompts: Left-padded prompt ids, shape [B, N].
        mask: True on prompt tokens other than padding, shape [B, N].
        max_new_tokens: Maximum number of tokens that will be appended.
    """

    def __init__(self, model: PreTrainedModel, prompts: Tensor, mask: Tensor, max_new_tokens: int) -> None:
        self._model, self._inputs, self._max_new_tokens = model, prompts, max_new_tokens
        self._mask, self._positions = mask.long(), position_ids(mask)
        self._cache = key_value_cache(model) if continues(model) else None
        if self._cache is not None:
            layers: Any = self._cache.layers
            self._cache.layers = [
                PreallocatedLayer(max_new_tokens) if type(layer) is DynamicLayer else layer
                for layer in layers
            ]

    def logits(self) -> Tensor:
        """The logits of each sequence's next token, shape [B, V]."""
        return self._forward(self._mask)

    def append(self, tokens: Tensor) -> None:
        """Append one token to each sequence, shape [B]."""
        inputs, positions = tokens[:, None], self._positions[:, -1:] + 1
        if self._cache is None:
            inputs = torch.cat([self._inputs, inputs], 1)
            positions = torch.cat([self._positions, positions], 1)
        self._inputs, self._positions = inputs, positions
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)

    def keep(self, sequences: Tensor) -> None:
        """Continue with these sequences, in this order; a sequence may be repeated."""
        self._inputs, self._mask, self._positions = (
            tensor[sequences] for tensor in (self._inputs, self._mask, self._positions)
        )
        if self._cache is not None:
            self._cache.reorder_cache(sequences)  # type: ignore[arg-type]

    def _forward(self, mask: Tensor) -> Tensor:
        inputs = {"input_ids": self._inputs, "attention_mask": mask, "position_ids": self._positions}
        cache = continuing(self._model, self._cache)
        logits: Tensor = self._model(**inputs, **cache, logits_to_keep=1).logits
        return logits[:, -1]


class StaticDecoder(Decoder):
    """Decoding with static buffers, as CUDA graph capture requires.

    Args:
        model: A model whose KV cache consists of `DynamicLayer`s.
        prompts: Left-padded prompt ids, shape [B, N].
        mask: True on prompt tokens other than padding, shape [B, N].
        max_new_tokens: Maximum number of tokens that will be appended.
    """

    def __init__(self, model: PreTrainedModel, prompts: Tensor, mask: Tensor, max_new_tokens: int) -> None:
        super().__init__(model, prompts, mask, max_new_tokens)
        # The cache position that the next forward pass writes; None until the prompts are read
        self._cache_position: Tensor | None = None

    def logits(self) -> Tensor:
        """The logits of each sequence's next token, shape [B, V], valid until the next call."""
        if self._cache_position is not None:
            return self._step()
        logits = self._forward(self._mask)
        # From here on, all inputs are buffers that are changed in place
        self._cache_position = self._mask.new_full((1,), self._mask.shape[1])
        self._mask = pad(self._mask, (0, self._max_new_tokens)).bool()[:, None, None]  # [B, 1, 1, N + new]
        self._inputs, self._positions = self._inputs[:, -1:].clone(), self._positions[:, -1:].clone()
        assert self._cache is not None
        layers: Any = self._cache.layers
        self._cache.layers = [
            StaticLayer(layer, self._max_new_tokens, self._cache_position) for layer in layers
        ]
        return logits

    def append(self, tokens: Tensor) -> None:
        """Append one token to each sequence, shape [B]."""
        self._inputs.copy_(tokens[:, None])

    def _step(self) -> Tensor:
        """A forward pass on the last token of each sequence."""
        assert self._cache_position is not None
        self._mask.index_fill_(-1, self._cache_position, True)
        self._positions += 1
        logits = self._forward(self._mask)
        self._cache_position += 1
        return logits


class GraphDecoder(StaticDecoder):
    """Decoding with a CUDA graph: one forward pass is captured and replayed for each further token.

    Launching the kernels of a forward pass takes Python about ten times as long as the GPU needs to run them
    (SmolLM2 on an H100, 256 sequences). If the capture fails, decoding continues without a graph.
    """

    _graph: torch.cuda.CUDAGraph | None = None
    _graph_logits: Tensor

    def keep(self, sequences: Tensor) -> None:
        """Continue with these sequences; the graph is captured again for their number."""
        super().keep(sequences)
        self._graph = None

    def _step(self) -> Tensor:
        if self._graph is not None:
            self._graph.replay()
            return self._graph_logits
        if not getattr(self._model, CAPTURES):
            return super()._step()
        device = self._inputs.device
        side_stream, current = _capture_stream(device), torch.cuda.current_stream(device)
        side_stream.wait_stream(current)
        with torch.cuda.stream(side_stream):
            # Warm-up: libraries allocate their workspaces in the first pass, which a capture must not contain
            logits = super()._step()
            try:
                self._graph, self._graph_logits = self._capture()
            except RuntimeError as error:
                setattr(self._model, CAPTURES, False)
                say_once(_without_graphs(self._model, str(error).partition("\n")[0]))
        current.wait_stream(side_stream)
        return logits

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        device = self._inputs.device
        pool = _LAST_GRAPH[device].pool() if device in _LAST_GRAPH else None
        # Other threads, such as a data loader's, may use the GPU during the capture
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            logits = super()._step()
        finally:
            graph.capture_end()
        _LAST_GRAPH[device] = graph
        return graph, logits


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for all captures, as each stream has a memory pool of its own."""
    return torch.cuda.Stream(device)


def make_decoder(model: PreTrainedModel, prompts: Tensor, mask: Tensor, max_new_tokens: int) -> Decoder:
    """The fastest decoder for a model: with CUDA graphs on a GPU, unless the model is sharded.

    Args:
        model: The model.
        prompts: Left-padded prompt ids, shape [B, N].
        mask: True on prompt tokens other than padding, shape [B, N].
        max_new_tokens: Maximum number of tokens that will be appended.
    """
    on_gpu = model.device.type == "cuda" and max_new_tokens >= LEAST_CAPTURED and not is_sharded(model)
    if on_gpu and continues(model) and captures_graphs(model):
        return GraphDecoder(model, prompts, mask, max_new_tokens)
    return Decoder(model, prompts, mask, max_new_tokens)


def captures_graphs(model: PreTrainedModel) -> bool:
    """Whether CUDA graphs of a model can be captured: static buffers give its logits, without a sync."""
    if CAPTURES not in vars(model):
        setattr(model, CAPTURES, False)
        # Models with caches or masks of their own raise all kinds of exceptions
        with full_precision_forward(model), suppress(Exception):
            setattr(model, CAPTURES, _agrees_with_static_buffers(model))
        if not getattr(model, CAPTURES):
            say_once(_without_graphs(model, "it synchronises with the GPU, or needs dynamic buffers"))
    captures: bool = getattr(model, CAPTURES)
    return captures


@torch.no_grad()
def _agrees_with_static_buffers(model: PreTrainedModel) -> bool:
    if any(type(layer) is not DynamicLayer for layer in key_value_cache(model).layers):
        return False
    tokens, mask = probe_tokens(model)
    steps = tokens.shape[1] - tokens.shape[1] // 2
    prompts, coming = tokens[:, :-steps], tokens[:, -steps:].unbind(1)
    dynamic = Decoder(model, prompts, mask[:, :-steps], steps)
    static = StaticDecoder(model, prompts, mask[:, :-steps], steps)
    agrees = agree(static.logits(), dynamic.logits())
    for token in coming:
        dynamic.append(token)
        static.append(token)
        with _sync_is_an_error(model.device):
            logits = static.logits()
        agrees &= agree(logits, dynamic.logits())
    return agrees


@contextmanager
def _sync_is_an_error(device: torch.device) -> Iterator[None]:
    """Operations that synchronise with the GPU raise an error here, rather than break a capture later."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _without_graphs(model: PreTrainedModel, reason: str) -> str:
    return f"a {model.config.model_type} model is sampled without CUDA graphs, which takes longer: {reason}"
