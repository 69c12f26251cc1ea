"""Baselines: what is subtracted from a completion's values, a function of the prompt's other completions."""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.checks import check_integer


def leave_one_out_baseline(values: Tensor, group_size: int) -> Tensor:
    """Mean over the other completions of the same prompt, for each completion.

    Args:
        values: Shape [B] or [B, T], prompt-major; each position is averaged separately.
        group_size: Completions per prompt.

    Returns:
        Same shape as `values`, differentiable in them.

    Raises:
        ConfigurationError: If `group_size` is below 2 or does not divide B.

    Example:
        >>> import torch
        >>> leave_one_out_baseline(torch.tensor([1.0, 2.0, 6.0]), group_size=3).tolist()
        [4.0, 3.5, 1.5]

    Reference: Kool, van Hoof, Welling (2019), "Buy 4 REINFORCE samples, get a baseline for free".
    """
    check_group_size(len(values), group_size)
    if group_size < 2:
        problem = f"must be at least 2 for a leave-one-out baseline, got {group_size}"
        raise ConfigurationError(problem, key="group_size")
    groups = values.reshape(len(values) // group_size, group_size, *values.shape[1:])
    # The sum over the others is the group's sum minus the completion's own value
    return ((groups.sum(1, keepdim=True) - groups) / (group_size - 1)).flatten(0, 1)


def values_before(mask: Tensor, every: int, value_of: Callable[[int], Tensor]) -> Tensor:
    """The values of what precedes each token of some completions, as far as they are computed.

    Before the first token all completions of a prompt have the same value, which cancels in a comparison of
    them and is 0 here. From the second token on it is computed for one token, and for every multiple of
    `every`; between, the last one computed counts.

    Args:
        mask: True on completion tokens, shape [B, T].
        every: The number of tokens between two computations.
        value_of: The values of the first so many tokens of each completion, or of the whole of a shorter one,
            shape [B].

    Returns:
        Shape [B, T], 0 outside the mask.

    Example:
        >>> mask = torch.ones(1, 6, dtype=torch.bool)
        >>> values_before(mask, 2, lambda length: torch.tensor([10.0 * length])).tolist()
        [[0.0, 10.0, 20.0, 20.0, 40.0, 40.0]]
    """
    before, count = torch.zeros(mask.shape, device=mask.device), mask.shape[1]
    for length in sorted({1, *range(every, count, every)} - {count}):
        before[:, length:] = value_of(length)[:, None]
    return torch.where(mask, before, 0)


def check_group_size(batch_size: int, group_size: int) -> None:
    """Raise unless the batch consists of complete groups.

    Raises:
        ConfigurationError: If `group_size` is not a positive divisor of `batch_size`.
    """
    check_integer(group_size=group_size)
    if group_size < 1 or batch_size % group_size:
        problem = f"must be a positive divisor of the number of sequences, {batch_size}, got {group_size}"
        raise ConfigurationError(problem, key="group_size")
