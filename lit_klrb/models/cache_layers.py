"""Layers of a cache of keys and values with room for tokens to come, so that what precedes is not moved."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer


class Roomy(DynamicLayer):
    """A layer that takes the room at its second pass, when it is known which rows go on.

    Args:
        room: Number of tokens after the first pass, at most.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        # With room, of which `keys` and `values` are the beginning
        self._whole: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the states of further tokens, shape [B, H, T, D]; returns all so far."""
        before = self.get_seq_length()
        if not before:
            super().update(key_states, value_states, *args, **options)
            return key_states, value_states
        self._whole = self._whole or _with_room(self, self._room)
        for whole, states in zip(self._whole, (key_states, value_states), strict=True):
            whole.narrow(2, before, states.shape[2]).copy_(states)
        return self._begin(before + key_states.shape[2])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these rows, shape [B]."""
        if not self._whole:
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            return
        self._whole = tuple(whole[beam_idx] for whole in self._whole)
        self._begin(self.get_seq_length())

    def _begin(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (whole[:, :, :length] for whole in self._whole)
        return self.keys, self.values


class Fixed(DynamicLayer):
    """A layer whose memory does not move: tokens are written at a place that lies on the device.

    Not transformers' `StaticLayer`, which gives values the type of keys: autocast leaves keys in float32.

    Args:
        layer: What precedes.
        room: Number of tokens to come, at most.
        place: The column of the next token, shape [1], which the caller moves.
    """

    def __init__(self, layer: DynamicLayer, room: int, place: Tensor) -> None:
        super().__init__()
        keys, values = _with_room(layer, room)
        self.lazy_initialization(keys, values)
        self.keys, self.values, self._place = keys, values, place

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states of one token per sequence, shape [B, H, 1, D]; returns all."""
        assert self.keys is not None
        assert self.values is not None
        # Each place is written once, in any order; the deterministic way cannot be recorded
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")
        try:
            self.keys.index_copy_(2, self._place, key_states.to(self.keys.dtype))
            self.values.index_copy_(2, self._place, value_states.to(self.values.dtype))
        finally:
            torch.set_deterministic_debug_mode(mode)
        return self.keys, self.values


def _with_room(layer: DynamicLayer, room: int) -> tuple[Tensor, Tensor]:
    """Keys and values before room, in the precision in which attention reads them.

    Under autocast it would else cast all of them in each pass.
    """
    assert layer.keys is not None
    assert layer.values is not None
    kind = layer.keys.device.type
    read = torch.float32 if kind == "cpu" else torch.get_autocast_dtype(kind)
    autocast = torch.is_autocast_enabled(kind)
    keys, values = (
        pad(states.to(read) if autocast else states, (0, 0, 0, room)) for states in (layer.keys, layer.values)
    )
    return keys, values
