"""Sequences that grow by a token at a time, and the logits of the next one."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lit_klrb.models.cache_layers import Fixed, Roomy
from lit_klrb.models.sharding import is_sharded
from lit_klrb.models.trials import agree, continues, continuing, key_value_cache, position_ids, trial_tokens
from lit_klrb.terminal import say_once

# Least number of tokens for which a pass is recorded, which takes Python two passes.
LEAST_RECORDED = 4
# The attribute of a model that says whether its passes may be recorded, which class and settings decide.
RECORDS = "records_passes"
# The last recording on each device: the next one takes its memory, which would else stay unused.
_LAST: dict[torch.device, torch.cuda.CUDAGraph] = {}


class Growing:
    """A batch of sequences, of which a model reads each token once, or whole sequences if it cannot continue.

    Args:
        model: The model.
        prompts: Left-padded prompt ids, shape [B, N].
        mask: True on prompt tokens other than padding, shape [B, N].
        room: Number of tokens to come, at most.
    """

    def __init__(self, model: PreTrainedModel, prompts: Tensor, mask: Tensor, room: int) -> None:
        self._model, self._unread, self._room = model, prompts, room
        self._mask, self._positions = mask.long(), position_ids(mask)
        self._cache = key_value_cache(model) if continues(model) else None
        if self._cache is not None:
            layers: Any = self._cache.layers
            self._cache.layers = [Roomy(room) if type(layer) is DynamicLayer else layer for layer in layers]

    def logits(self) -> Tensor:
        """The logits of each sequence's next token, shape [B, V]."""
        return self._read(self._mask)

    def append(self, tokens: Tensor) -> None:
        """Add one token to each sequence, shape [B]; to be read next."""
        unread, positions = tokens[:, None], self._positions[:, -1:] + 1
        if self._cache is None:
            unread = torch.cat([self._unread, unread], 1)
            positions = torch.cat([self._positions, positions], 1)
        self._unread, self._positions = unread, positions
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences, in this order; a sequence may be repeated."""
        self._unread, self._mask, self._positions = (
            kept[rows] for kept in (self._unread, self._mask, self._positions)
        )
        if self._cache is not None:
            self._cache.reorder_cache(rows)  # type: ignore[arg-type]

    def _read(self, mask: Tensor) -> Tensor:
        read = {"input_ids": self._unread, "attention_mask": mask, "position_ids": self._positions}
        states = continuing(self._model, self._cache)
        logits: Tensor = self._model(**read, **states, logits_to_keep=1).logits
        return logits[:, -1]


class InPlace(Growing):
    """The same in memory that does not move once the prompts are read, so that a pass can be recorded.

    Args:
        model: A model with `DynamicLayer`s only in its cache.
        prompts: Left-padded prompt ids, shape [B, N].
        mask: True on prompt tokens other than padding, shape [B, N].
        room: Number of tokens to come, at most.
    """

    def __init__(self, model: PreTrainedModel, prompts: Tensor, mask: Tensor, room: int) -> None:
        super().__init__(model, prompts, mask, room)
        # The column that the next pass writes; None before the first, which reads the prompts
        self._place: Tensor | None = None

    def logits(self) -> Tensor:
        """The logits of each sequence's next token, shape [B, V], until the next call."""
        if self._place is not None:
            return self._pass()
        logits = self._read(self._mask)
        self._place = self._mask.new_full((1,), self._mask.shape[1])
        self._mask = pad(self._mask, (0, self._room)).bool()[:, None, None]  # [B, 1, 1, N + room]
        self._unread, self._positions = self._unread[:, -1:].clone(), self._positions[:, -1:].clone()
        assert self._cache is not None
        layers: Any = self._cache.layers
        self._cache.layers = [Fixed(layer, self._room, self._place) for layer in layers]
        return logits

    def append(self, tokens: Tensor) -> None:
        """Add one token to each sequence, shape [B]; to be read next."""
        self._unread.copy_(tokens[:, None])

    def _pass(self) -> Tensor:
        """Read the token of each sequence, the last that was added."""
        assert self._place is not None
        self._mask.index_fill_(-1, self._place, True)
        self._positions += 1
        logits = self._read(self._mask)
        self._place += 1
        return logits


class Recorded(InPlace):
    """The same on a GPU, where a pass is recorded once and replayed for each further token.

    To start the operations of a pass takes Python about ten times as long as the GPU takes for them (SmolLM2
    on an H100, 256 sequences). A pass that cannot be recorded is made as it is.
    """

    _graph: torch.cuda.CUDAGraph | None = None
    _next: Tensor

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences, for which the pass is recorded again."""
        super().keep(rows)
        self._graph = None

    def _pass(self) -> Tensor:
        if self._graph is not None:
            self._graph.replay()
            return self._next
        if not getattr(self._model, RECORDS):
            return super()._pass()
        device = self._unread.device
        stream, here = _stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            # Made once as it is: libraries allocate what they need at first
            logits = super()._pass()
            try:
                self._graph, self._next = self._record()
            except RuntimeError as error:
                setattr(self._model, RECORDS, False)
                say_once(_slower(self._model, str(error).partition("\n")[0]))
        here.wait_stream(stream)
        return logits

    def _record(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on, such as one that loads data
        device = self._unread.device
        pool = _LAST[device].pool() if device in _LAST else None
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            logits = super()._pass()
        finally:
            graph.capture_end()
        _LAST[device] = graph
        return graph, logits


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which passes are recorded, as each stream keeps memory of its own."""
    return torch.cuda.Stream(device)


def growing(model: PreTrainedModel, prompts: Tensor, mask: Tensor, room: int) -> Growing:
    """Sequences that begin with prompts, on a GPU with recorded passes unless processes share the model.

    Args:
        model: The model.
        prompts: Left-padded prompt ids, shape [B, N].
        mask: True on prompt tokens other than padding, shape [B, N].
        room: Number of tokens to come, at most.
    """
    may_record = model.device.type == "cuda" and room >= LEAST_RECORDED and not is_sharded(model)
    if may_record and continues(model) and records(model):
        return Recorded(model, prompts, mask, room)
    return Growing(model, prompts, mask, room)


def records(model: PreTrainedModel) -> bool:
    """Whether a model's passes can be recorded: they do not wait, and agree in memory that does not move."""
    if RECORDS not in vars(model):
        setattr(model, RECORDS, False)
        # Models with caches or masks of their own raise all kinds of exceptions
        with torch.autocast(model.device.type, enabled=False), suppress(Exception):
            setattr(model, RECORDS, _agrees_in_place(model))
        if not getattr(model, RECORDS):
            say_once(_slower(model, "they wait for the GPU, or need memory that moves"))
    found: bool = getattr(model, RECORDS)
    return found


@torch.no_grad()
def _agrees_in_place(model: PreTrainedModel) -> bool:
    if any(type(layer) is not DynamicLayer for layer in key_value_cache(model).layers):
        return False
    tokens, mask = trial_tokens(model)
    steps = tokens.shape[1] - tokens.shape[1] // 2
    read, coming = tokens[:, :-steps], tokens[:, -steps:].unbind(1)
    plain = Growing(model, read, mask[:, :-steps], steps)
    fixed = InPlace(model, read, mask[:, :-steps], steps)
    agrees = agree(fixed.logits(), plain.logits())
    for token in coming:
        plain.append(token)
        fixed.append(token)
        with _without_waiting(model.device):
            logits = fixed.logits()
        agrees &= agree(logits, plain.logits())
    return agrees


@contextmanager
def _without_waiting(device: torch.device) -> Iterator[None]:
    """Operations that wait for a GPU raise an error, before a recording that they would break."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _slower(model: PreTrainedModel, reason: str) -> str:
    return (
        f"sampling from a {model.config.model_type} model takes longer than recorded passes would: {reason}"
    )
