"""Means with the standard error that the sampling design gives them."""

import torch
from torch import Tensor


def clustered_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over prompts and completions, with its standard error clustered by prompt.

    Completions of one prompt are alike, so the prompts' means are the independent observations:
    the error is their sample standard deviation divided by sqrt(P).

    Args:
        values: One number a completion, [P, K].

    Returns:
        Mean and standard error, scalars; the error of a single prompt is NaN.

    Example:
        >>> mean, error = clustered_mean(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
        >>> mean.item(), error.item()
        (2.0, 1.0)
    """
    means = values.mean(1)
    if len(means) < 2:
        return means.mean(), torch.full_like(means.mean(), torch.nan)
    return means.mean(), means.std() / len(means) ** 0.5
