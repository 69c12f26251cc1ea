"""Tensors as plain numbers, for artifacts."""

from typing import Any

from torch import Tensor


def rounded(values: Tensor, digits: int) -> Any:
    """A tensor as nested lists of numbers, rounded to `digits` significant digits.

    Example:
        >>> import torch
        >>> rounded(torch.tensor([[1 / 3, 2.0]]), digits=4)
        [[0.3333, 2.0]]
    """
    if values.ndim:
        return [rounded(value, digits) for value in values]
    return float(f"{values.item():.{digits}g}")
