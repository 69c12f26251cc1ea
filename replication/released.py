"""The estimators of the code of arXiv:2504.10637 with its baseline, which is one of other prompts.

As soon as that code accumulates gradients it takes the leave-one-out mean of other prompts. The gradient is
unbiased without clipping, as the baseline does not depend on the own completion, but the rewards' variance
between prompts is left in it.
"""

from dataclasses import dataclass
from typing import final

from torch import Tensor
from typing_extensions import override

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import ReleasedMonteCarlo, ReleasedRaoBlackwell
from lit_klrb.estimators.released import ReleasedEstimator
from lit_klrb.functional.baselines import check_group_size, leave_one_out_baseline


@dataclass(frozen=True, kw_only=True)
class OtherPromptsEstimator(ReleasedEstimator):
    """A released estimator with the leave-one-out mean of other prompts, see `other_prompts_baseline`."""

    @override
    def centred(self, values: Tensor, group_size: int) -> Tensor:
        return values - other_prompts_baseline(values, group_size)


@final
@dataclass(frozen=True, kw_only=True)
class OtherPromptsMonteCarlo(OtherPromptsEstimator):
    """`ReleasedMonteCarlo` with this baseline."""

    recipe = ReleasedMonteCarlo.recipe
    explanation = ReleasedMonteCarlo.explanation


@final
@dataclass(frozen=True, kw_only=True)
class OtherPromptsRaoBlackwell(OtherPromptsEstimator):
    """`ReleasedRaoBlackwell` with this baseline."""

    recipe = ReleasedRaoBlackwell.recipe
    explanation = ReleasedRaoBlackwell.explanation


def other_prompts_baseline(values: Tensor, group_size: int) -> Tensor:
    """Mean over completions of other prompts, which the code of arXiv:2504.10637 takes for the same prompt's.

    With P prompts and K completions each, that code holds the first completions of all prompts, then the
    second, and so on. If every micro-batch has one completion of each prompt, its rows i, i + P/K,
    i + 2 P/K, ... are taken for a group, but belong to K different prompts.

    Args:
        values: Shape [B] or [B, T], prompt-major; each position is averaged separately.
        group_size: Completions per prompt, K.

    Returns:
        Same shape as `values`, differentiable in them.

    Raises:
        ConfigurationError: If K is below 2 or does not divide the number of prompts.

    Example:
        >>> import torch
        >>> other_prompts_baseline(torch.tensor([1.0, 2.0, 10.0, 20.0]), group_size=2).tolist()
        [10.0, 20.0, 1.0, 2.0]
    """
    check_group_size(len(values), group_size)
    prompts = len(values) // group_size
    if prompts % group_size:
        problem = f"must divide the number of prompts for a baseline of other prompts, {prompts}"
        raise ConfigurationError(f"{problem}, got {group_size}", key="group_size")
    # From prompt-major to [prompts of a group, groups, completions] to completions of one index side by side
    grid = values.reshape(group_size, -1, group_size, *values.shape[1:])
    baseline = leave_one_out_baseline(grid.transpose(0, 2).reshape(values.shape), group_size)
    return baseline.reshape(grid.transpose(0, 2).shape).transpose(0, 2).reshape(values.shape)
