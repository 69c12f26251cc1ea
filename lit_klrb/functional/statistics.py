"""Means and ratios of means with standard errors that respect the sampling design."""

import torch
from torch import Tensor

# A standard error from fewer prompts is itself too uncertain to be relied on.
FEW_PROMPTS = 10


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


def ratio_of_means(numerators: Tensor, denominators: Tensor) -> tuple[Tensor, Tensor]:
    """The ratio of two means over clusters, and the influence of each cluster on it.

    R = mean(a) / mean(b), and e_i = (a_i - R b_i) / mean(b), whose mean is 0. Clusters are independent, so
    the standard error of R is, to first order, that of the mean of e: see `influence_error`. With b = 1 this
    is the mean of a. A KL per token is such a ratio: both the KL and the number of tokens of a completion are
    random. The standard error of a difference of ratios on the same clusters is that of the difference of
    their influences.

    Args:
        numerators: Sum of each cluster, shape [..., C].
        denominators: What it is divided by, such as the cluster's number of tokens, shape [..., C].

    Returns:
        The ratio, shape [...], and the influences, shape [..., C].

    Example:
        >>> ratio, influences = ratio_of_means(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]))
        >>> ratio.item(), influences.tolist(), influence_error(influences).item()
        (1.0, [-0.5, 0.5], 0.5)

    Reference: Cochran (1977), "Sampling Techniques", Section 6.4.
    """
    scale = denominators.mean(-1)
    ratio = numerators.mean(-1) / scale
    return ratio, (numerators - ratio.unsqueeze(-1) * denominators) / scale.unsqueeze(-1)


def influence_error(influences: Tensor) -> Tensor:
    """The standard error of a ratio, or a difference of ratios, from its influences.

    Args:
        influences: The influence of each of C independent clusters, shape [..., C].

    Returns:
        Shape [...]; NaN for a single cluster.
    """
    clusters = influences.shape[-1]
    if clusters < 2:
        return torch.full_like(influences[..., 0], torch.nan)
    error: Tensor = influences.std(-1) / clusters**0.5
    return error
