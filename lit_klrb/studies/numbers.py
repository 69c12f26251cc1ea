"""Tensors as plain numbers, for artifacts."""

import math
from typing import Any

import torch
from torch import Tensor

# The coarsest unit of an entry of a Gram matrix, as a fraction of the norms. Rounding to it makes errors of
# about 1e-6 of the norms; those of float32 gradients are as large.
_GRAM_PRECISION = 1e-5


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


def lower_triangle(gram: Tensor) -> list[list[float]]:
    """The lower triangle of a Gram matrix, row by row, without the digits that gradients do not have.

    Example:
        >>> import torch
        >>> lower_triangle(torch.tensor([[400.0, 1 / 3], [1 / 3, 4.0]], dtype=torch.float64))
        [[400.0], [0.3333, 4.0]]
    """
    norms = gram.diagonal().sqrt()
    units = _GRAM_PRECISION * norms[:, None] * norms
    places = torch.where(units > 0, -units.log10().floor(), 0.0).nan_to_num().int().tolist()
    return [
        [
            round(value, place) if math.isfinite(value) else value
            for value, place in zip(row[: i + 1], places[i], strict=False)
        ]
        for i, row in enumerate(gram.tolist())
    ]
