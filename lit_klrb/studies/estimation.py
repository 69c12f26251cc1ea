"""All KL estimates on the same completions, for their means and variances."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import lightning as L
import torch
from torch import Tensor

from lit_klrb import schema
from lit_klrb.distributed import stacked, stacked_stats
from lit_klrb.errors import ConfigurationError, check_at_least, concerning
from lit_klrb.functional import TokenStats, horvitz_thompson, kl_values
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import PolicyStudy, rounded

# Prompts per forward pass.
PROMPTS_PER_PASS = 4


@final
class EstimationStudy(PolicyStudy):
    """Samples many completions of some prompts and records all KL estimates, in nats per completion.

    For each snapshot and each estimate of `kl_values` the artifact has one number per completion. The
    Horvitz-Thompson estimate depends on the number of completions: it has one number per group of M.

    Args:
        prompts: Number of prompts.
        completions: Completions per prompt; a multiple of every number in group_sizes.
        group_sizes: Numbers of completions (M) per Horvitz-Thompson estimate.
        at: When to measure, as fractions of the run's steps: 0 before the first, 1 after the last.
    """

    name = schema.ESTIMATION

    def __init__(
        self,
        prompts: int = 32,
        completions: int = 100,
        group_sizes: Sequence[int] = (1, 5, 10),
        at: Sequence[float] = (0.0, 1.0),
    ) -> None:
        super().__init__(at)
        with concerning(type(self).__name__):
            check_at_least(2, prompts=prompts)
        check_group_sizes(completions, group_sizes)
        self.sizes, self.group_sizes = (prompts, completions), list(group_sizes)
        self.needs = (1, prompts)

    @property
    def design(self) -> dict[str, Any]:
        """Prompts, completions per prompt, and group sizes."""
        prompts, completions = self.sizes
        return {"prompts": prompts, "completions": completions, "group_sizes": self.group_sizes}

    def measure(self, trainer: L.Trainer, module: OnPolicyModule) -> dict[str, Any]:
        """Each estimate, shape [P, completions], and the Horvitz-Thompson estimates by group size."""
        prompts, completions = self.sizes
        sampling = replace(module.sampling, completions_per_prompt=completions)
        seed = derive_seed(module.seed, self.name)
        (batch,) = self.prompts(trainer, module, batches=1, size=prompts)
        rollouts, parts = [], []
        for first in range(0, prompts, PROMPTS_PER_PASS):
            rows = slice(first, first + PROMPTS_PER_PASS)
            some = {name: value[rows] for name, value in batch.items()}
            with torch.no_grad():
                rollout = module.pair.sample(some, sampling, seed=seed, rows_before=first * completions)
                parts.append(module.pair.score(rollout, some)[1].map(Tensor.cpu))
            rollouts.append(rollout.map(Tensor.cpu))
        mask, tokens = (stacked([getattr(one, name) for one in rollouts]) for name in ("mask", "completions"))
        return estimates(stacked_stats(parts), mask, tokens, completions, self.group_sizes)


def check_group_sizes(completions: int, group_sizes: Sequence[int]) -> None:
    """Check that groups of each size divide the completions of a prompt."""
    if not group_sizes or any(size < 1 or completions % size for size in group_sizes):
        raise ConfigurationError(
            f"completions={completions} must be a multiple of every number in group_sizes={list(group_sizes)}"
        )


def estimates(
    stats: TokenStats, mask: Tensor, tokens: Tensor, completions: int, group_sizes: Sequence[int]
) -> dict[str, Any]:
    """All KL estimates on the same completions, as in the artifacts: see `kl_values`.

    Returns:
        `values`, estimate -> one number per completion, [P, completions]; `horvitz_thompson`, M -> one
        number per M completions, [P, completions / M].
    """
    values = kl_values(stats, mask, tokens, group_size=completions)
    del values["ht"]
    logprobs = stats.masked(mask).logprobs.sum(-1)
    by_size = {}
    for size in group_sizes:
        estimate = horvitz_thompson(values["k1"].flatten(), logprobs, tokens, mask, size)
        by_size[str(size)] = rounded(estimate.view(len(mask) // completions, -1), 6)
    by_name = {name: rounded(value, 6) for name, value in values.items()}
    return {"values": by_name, "horvitz_thompson": by_size}
