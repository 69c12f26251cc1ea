"""Means with standard errors that respect the sampling design."""

import torch
from torch import Tensor


def clustered_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over prompts and completions, with a standard error clustered by prompt.

    Completions of the same prompt are correlated, so the independent observations are the means per prompt:
    the standard error is their sample standard deviation divided by sqrt(P).

    Args:
        values: One value per completion, shape [P, K].

    Returns:
        Mean and standard error, scalars; the standard error is NaN for a single prompt.

    Example:
        >>> mean, error = clustered_mean(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
        >>> mean.item(), error.item()
        (2.0, 1.0)
    """
    means = values.mean(1)
    if len(means) < 2:
        return means.mean(), torch.full_like(means.mean(), torch.nan)
    return means.mean(), means.std() / len(means) ** 0.5
