"""KV cache layers that allocate the positions of coming tokens, so that appending copies nothing."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """A layer that allocates positions for all coming tokens at its second forward pass.

    Not at the first, which reads the prompts: only then is it known which sequences continue.

    Args:
        max_new_tokens: Maximum number of tokens after the first forward pass.
    """

    def __init__(self, max_new_tokens: int) -> None:
        super().__init__()
        self._max_new_tokens = max_new_tokens
        # Keys and values with unused positions at the end; `keys` and `values` are views of their beginnings
        self._allocated: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, shape [B, H, T, D]; returns all keys and values so far."""
        length = self.get_seq_length()
        if not length:
            super().update(key_states, value_states, *args, **options)
            return key_states, value_states
        self._allocated = self._allocated or _allocate(self, self._max_new_tokens)
        for buffer, states in zip(self._allocated, (key_states, value_states), strict=True):
            buffer.narrow(2, length, states.shape[2]).copy_(states)
        return self._view(length + key_states.shape[2])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with these sequences, indices of shape [B]."""
        if not self._allocated:
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            return
        self._allocated = tuple(buffer[beam_idx] for buffer in self._allocated)
        self._view(self.get_seq_length())

    def _view(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._allocated)
        return self.keys, self.values


class StaticLayer(DynamicLayer):
    """A layer with static buffers, written at a position that is a tensor on the device.

    CUDA graph capture requires both. Not transformers' `StaticLayer`, which casts values to the dtype of the
    keys: autocast leaves keys in float32.

    Args:
        layer: The layer whose keys and values are copied.
        max_new_tokens: Maximum number of coming tokens.
        position: The position of the next token, shape [1]; the caller advances it.
    """

    def __init__(self, layer: DynamicLayer, max_new_tokens: int, position: Tensor) -> None:
        super().__init__()
        keys, values = _allocate(layer, max_new_tokens)
        self.lazy_initialization(keys, values)
        self.keys, self.values, self._position = keys, values, position

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token per sequence, shape [B, H, 1, D]; returns the buffers."""
        assert self.keys is not None
        assert self.values is not None
        # Each position is written once, in any order; the deterministic kernel cannot be captured
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")
        try:
            self.keys.index_copy_(2, self._position, key_states.to(self.keys.dtype))
            self.values.index_copy_(2, self._position, value_states.to(self.values.dtype))
        finally:
            torch.set_deterministic_debug_mode(mode)
        return self.keys, self.values


def _allocate(layer: DynamicLayer, max_new_tokens: int) -> tuple[Tensor, Tensor]:
    """Copies of a layer's keys and values with unused positions at the end.

    They have the dtype in which attention reads them: autocast would otherwise cast all of them in each pass.
    """
    assert layer.keys is not None
    assert layer.values is not None
    device_type = layer.keys.device.type
    attention_dtype = torch.float32 if device_type == "cpu" else torch.get_autocast_dtype(device_type)
    autocast = torch.is_autocast_enabled(device_type)
    keys, values = (
        pad(states.to(attention_dtype) if autocast else states, (0, 0, 0, max_new_tokens))
        for states in (layer.keys, layer.values)
    )
    return keys, values
