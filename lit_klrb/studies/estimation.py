"""All KL estimates on the same completions, for their means and variances."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import lightning as L
import torch

from lit_klrb import schema
from lit_klrb.distributed import stacked, stacked_stats
from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import horvitz_thompson, kl_values
from lit_klrb.modules.rloo import OnPolicyModule
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import PolicyStudy, rounded

# Prompts per forward pass.
_PROMPTS_PER_PASS = 4


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
        if prompts < 2:
            raise ConfigurationError(f"EstimationStudy: prompts must be at least 2, got {prompts}")
        if not group_sizes or any(size < 1 or completions % size for size in group_sizes):
            raise ConfigurationError(
                f"EstimationStudy: completions={completions} must be a multiple of every number in "
                f"group_sizes={list(group_sizes)}"
            )
        self.sizes, self.group_sizes = (prompts, completions), list(group_sizes)

    @property
    def design(self) -> dict[str, Any]:
        """Prompts, completions per prompt, and group sizes."""
        prompts, completions = self.sizes
        return {"prompts": prompts, "completions": completions, "group_sizes": self.group_sizes}

    @torch.no_grad()
    def measure(self, trainer: L.Trainer, module: OnPolicyModule) -> dict[str, Any]:
        """Each estimate, shape [P, completions], and the Horvitz-Thompson estimates by group size."""
        prompts, completions = self.sizes
        sampling = replace(module.sampling, completions_per_prompt=completions)
        seed = derive_seed(module.seed, self.name)
        (batch,) = self.prompts(trainer, module, batches=1, size=prompts)
        rollouts, parts = [], []
        for first in range(0, prompts, _PROMPTS_PER_PASS):
            some = {name: value[first : first + _PROMPTS_PER_PASS] for name, value in batch.items()}
            rollout = module.generate(
                module.policy, some, sampling, seed=seed, rows_before=first * completions
            )
            rollouts.append(rollout)
            parts.append(module.score(rollout)[1])
        stats = stacked_stats(parts)
        mask = stacked([rollout.mask for rollout in rollouts])
        tokens = stacked([rollout.completions for rollout in rollouts])
        values = kl_values(stats, mask, tokens, group_size=completions)
        del values["ht"]
        logprobs = stats.masked(mask).logprobs.sum(-1)
        by_size = {
            str(size): horvitz_thompson(values["k1"].flatten(), logprobs, tokens, mask, size)
            for size in self.group_sizes
        }
        return {
            "values": {name: rounded(value, 6) for name, value in values.items()},
            "horvitz_thompson": {
                size: rounded(value.view(prompts, -1), 6) for size, value in by_size.items()
            },
        }
