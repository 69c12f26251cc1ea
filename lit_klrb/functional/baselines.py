"""Baselines: functions of the other completions of a prompt, subtracted from a completion's values."""

from torch import Tensor

from lit_klrb.errors import ConfigurationError


def leave_one_out_baseline(values: Tensor, group_size: int) -> Tensor:
    """For each completion the mean over the other completions of its prompt.

    Args:
        values: Shape [B] or [B, T]; the completions of a prompt are adjacent. Averaged position by position.
        group_size: Completions per prompt.

    Returns:
        The shape of `values`; differentiable in them.

    Raises:
        ConfigurationError: If `group_size` is below 2 or does not divide B.

    Example:
        >>> import torch
        >>> leave_one_out_baseline(torch.tensor([1.0, 2.0, 6.0]), group_size=3).tolist()
        [4.0, 3.5, 1.5]

    Reference: Kool, van Hoof, Welling (2019), "Buy 4 REINFORCE samples, get a baseline for free".
    """
    if group_size < 2:
        raise ConfigurationError(f"group_size is {group_size}; a leave-one-out baseline needs at least 2")
    check_group_size(len(values), group_size)
    groups = values.reshape(-1, group_size, *values.shape[1:])
    return ((groups.sum(1, keepdim=True) - groups) / (group_size - 1)).flatten(0, 1)


def check_group_size(batch_size: int, group_size: int) -> None:
    """Raise unless the batch is made of whole groups.

    Raises:
        ConfigurationError: If `group_size` is not a positive divisor of `batch_size`.
    """
    if group_size < 1 or batch_size % group_size:
        raise ConfigurationError(
            f"group_size is {group_size}; a divisor of the {batch_size} sequences expected"
        )
