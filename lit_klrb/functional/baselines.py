"""Baselines: what is subtracted from a completion's values, a function of the prompt's other completions."""

from torch import Tensor

from lit_klrb.errors import ConfigurationError


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
    if group_size < 2:
        raise ConfigurationError(
            f"must be at least 2 for a leave-one-out baseline, got {group_size}", key="group_size"
        )
    check_group_size(len(values), group_size)
    groups = values.reshape(-1, group_size, *values.shape[1:])
    # The sum over the others is the group's sum minus the completion's own value
    return ((groups.sum(1, keepdim=True) - groups) / (group_size - 1)).flatten(0, 1)


def check_group_size(batch_size: int, group_size: int) -> None:
    """Raise unless the batch consists of complete groups.

    Raises:
        ConfigurationError: If `group_size` is not a positive divisor of `batch_size`.
    """
    if group_size < 1 or batch_size % group_size:
        raise ConfigurationError(
            f"must be a positive divisor of the number of sequences, {batch_size}, got {group_size}",
            key="group_size",
        )
