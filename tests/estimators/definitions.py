"""The two terms of every estimator, defined independently as functions of one completion."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Definition(NamedTuple):
    """Terms of a completion as functions of its tokens' log ratios r and exact KLs k.

    Args:
        score: c_t; r, k and the position t are given.
        pathwise: The sum of l_t over the completion.
        whole: Whether c_t is the same at every t, also after the end, so that its baseline is that of RLOO.
    """

    score: Callable[[Tensor, Tensor, int], Tensor]
    pathwise: Callable[[Tensor, Tensor], Tensor]
    whole: bool = False


def zero(r, k, t=None):
    return torch.zeros(())


def k3(r):
    return r + (-r).exp() - 1


DEFINITIONS = {
    "MonteCarlo": Definition(lambda r, k, t: r.sum(), zero, whole=True),
    "MonteCarloRewardToGo": Definition(lambda r, k, t: r[t:].sum(), zero),
    "RaoBlackwell": Definition(lambda r, k, t: k[t + 1 :].sum(), lambda r, k: k.sum()),
    "RaoBlackwellSequence": Definition(lambda r, k, t: k.sum(), lambda r, k: k.sum(), whole=True),
    "RaoBlackwellLite": Definition(lambda r, k, t: r[t] - k[t] + k[t + 1 :].sum(), zero),
    "ReleasedMonteCarlo": Definition(lambda r, k, t: r.sum(), lambda r, k: r.sum(), whole=True),
    "ReleasedRaoBlackwell": Definition(lambda r, k, t: k.sum(), lambda r, k: k.sum(), whole=True),
    "K1Loss": Definition(zero, lambda r, k: r.sum()),
    "K2Loss": Definition(zero, lambda r, k: (r**2 / 2).sum()),
    "K3Loss": Definition(zero, lambda r, k: k3(r).sum()),
    "K3LossSequence": Definition(zero, lambda r, k: k3(r.sum())),
    "K3Reward": Definition(lambda r, k, t: k3(r).sum(), zero, whole=True),
    "RaoBlackwellLoss": Definition(zero, lambda r, k: k.sum()),
    "RaoBlackwellReward": Definition(lambda r, k, t: k.sum(), zero, whole=True),
    "NoKL": Definition(zero, zero),
}


def score_weights(name, log_ratio, kl, mask, group_size, baseline):
    """c_t minus the mean over the others of the group, in plain loops, shape [B, T]."""
    alone = torch.zeros(mask.shape, dtype=torch.float64)
    for row, length in enumerate(mask.sum(1).tolist()):
        for t in range(length):
            alone[row, t] = DEFINITIONS[name].score(log_ratio[row, :length], kl[row, :length], t)
    if DEFINITIONS[name].whole:
        alone = alone[:, :1].expand_as(alone)
    result = alone.clone()
    for row in range(len(mask) if baseline is not None else 0):
        first = row // group_size * group_size
        others = [other for other in range(first, first + group_size) if other != row]
        result[row] -= alone[others].mean(0)
    return torch.where(mask, result, 0)
