"""The rules for arguments of all functions of tensors: shapes, masks, and tokens outside the vocabulary."""

import operator
import sys
from typing import Any

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError

# The label of positions without a token, as in Hugging Face's data
IGNORED = -100


def check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Check that a value is a tensor of this shape; None is skipped.

    Raises:
        ConfigurationError: If it is something else; names it.

    Example:
        >>> check_shape("rewards", torch.ones(4, 1), (4,))
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: rewards: must have shape [4], got [4, 1]; pass rewards.squeeze(-1)
    """
    if value is None:
        return
    if not isinstance(value, Tensor):
        problem = f"must be a tensor of shape {list(shape)}, got {type(value).__name__}"
        raise ConfigurationError(f"{problem}; pass torch.tensor({name})", key=name)
    if tuple(value.shape) != shape:
        remedy = f"; pass {name}.squeeze(-1)" if tuple(value.shape) == (*shape, 1) else ""
        problem = f"must have shape {list(shape)}, got {list(value.shape)}"
        raise ConfigurationError(problem + remedy, key=name)


def check_mask(mask: Any, shape: tuple[int, ...] | None = None) -> None:
    """Check that a mask is a boolean matrix, of this shape if one is given.

    Numbers are refused: torch reads them as indices or converts them, depending on the function.
    """
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.ndim != 2:
        got = f"{mask.dtype} of shape {[*mask.shape]}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigurationError(f"must be torch.bool of shape [B, T], got {got}", key="mask")
    if shape is not None:
        check_shape("mask", mask, shape)


def check_integer(**values: Any) -> None:
    """Check that values are integers.

    Example:
        >>> check_integer(group_size=2.0)
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: group_size: must be an integer, got 2.0
    """
    for name, value in values.items():
        try:
            operator.index(value)
        except TypeError:
            raise ConfigurationError(f"must be an integer, got {value!r}", key=name) from None


def inside_mask(tokens: Tensor, mask: Tensor | None, vocabulary: int | None = None) -> Tensor | None:
    """The mask of a function of tokens, all of which are in the vocabulary inside it.

    Args:
        tokens: Token ids, shape [B, T] or [B, T, n].
        mask: True where the tokens count, shape [B, T]; None for all that are not -100.
        vocabulary: Size of the vocabulary, V; None if it is unknown.

    Returns:
        The mask; without one, that of the tokens, in their shape, or None if none is -100.

    Raises:
        ConfigurationError: If a token inside the mask is none of 0..V - 1; names its position and value.

    Example:
        >>> inside_mask(torch.tensor([[3, -100]]), None, vocabulary=5).tolist()
        [[True, False]]
        >>> inside_mask(torch.tensor([[3, 5]]), None, vocabulary=5)
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: tokens: must be in 0..4 inside the mask, got 5 at [0, 1]
    """
    if tokens.is_floating_point() or tokens.dtype is torch.bool:
        raise ConfigurationError(f"must be integers, got {tokens.dtype}", key="tokens")
    size = sys.maxsize if vocabulary is None else vocabulary
    outside = (tokens < 0) | (tokens >= size)
    if torch.compiler.is_compiling() or not bool(outside.any()):
        return mask
    counted = tokens != IGNORED if mask is None else mask
    wrong = outside & counted.view(*counted.shape, *[1] * (tokens.ndim - counted.ndim))
    if bool(wrong.any()):
        position = wrong.nonzero()[0].tolist()
        allowed = "at least 0" if vocabulary is None else f"in 0..{vocabulary - 1}"
        value = tokens[tuple(position)].item()
        raise ConfigurationError(
            f"must be {allowed} inside the mask, got {value} at {position}", key="tokens"
        )
    return counted


def rows_of(values: Tensor, mask: Tensor | None) -> Tensor:
    """Select the rows inside the mask: [B, T, ...] to [N, ...]."""
    return values.flatten(0, 1) if mask is None else values[mask]


def positions_of(rows: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The inverse of `rows_of`: [N, ...] to [B, T, ...], 0 outside the mask."""
    if mask is None:
        return rows.view_as(tokens)
    inside = mask.view(*mask.shape, *[1] * (tokens.ndim - 2))
    return rows.new_zeros(tokens.shape).masked_scatter(inside, rows)
