"""Whether a processor is faster or slower in bfloat16, which only a measurement tells."""

import functools
import timeit

import torch

# Rows, columns and inner size of the products: a layer of SmolLM2-135M on a small batch.
SHAPE = 256, 1536, 576
ROUNDS = 3


@functools.cache
def bfloat16_speed() -> float:
    """Products of matrices per second in bfloat16 relative to those in float32, on this processor.

    Processors without bfloat16 units convert every number and have a fifth of the speed; those with them have
    several times as much. It takes some milliseconds, once in a process.
    """
    return _seconds(torch.float32) / _seconds(torch.bfloat16)


def _seconds(dtype: torch.dtype) -> float:
    """The least time of a product in some rounds, as what else the machine does only adds to it."""
    rows, columns, inner = SHAPE
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    return min(timeit.repeat(lambda: left @ right, number=1, repeat=ROUNDS))


def slow_precision(precision: str, device: torch.device) -> str | None:
    """One line if a run in bfloat16 would be slower here than in float32; None otherwise.

    Args:
        precision: As `trainer.precision`, such as "bf16-mixed".
        device: The device of the model; only processors are measured.

    Example:
        >>> slow_precision("32-true", torch.device("cpu")) is None
        True
    """
    if not precision.startswith("bf16") or device.type != "cpu" or (speed := bfloat16_speed()) >= 1:
        return None
    return (
        f"trainer.precision: {precision} is slow on this processor: products of matrices in bfloat16 have "
        f"{speed:.2f} of the speed of float32; --trainer.precision 32-true is faster"
    )
