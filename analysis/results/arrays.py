"""Numbers of an artifact as arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def array(values: Any, shape: tuple[int, ...], name: str, *, finite: bool = True) -> FloatArray:
    """Nested lists of numbers as an array.

    Raises:
        ValueError: If they do not have the shape or, with `finite`, are not finite; names them.
    """
    found = np.array(values, dtype=np.float64)
    if found.shape != shape or not (np.isfinite(found) | (not finite)).all():
        raise ValueError(f"{name} has shape {found.shape}, expected finite numbers of shape {shape}")
    return found
