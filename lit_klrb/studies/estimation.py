"""All KL estimates on the same completions, for their means and variances."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import lightning as L
from torch import Tensor

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError, check_at_least, concerning
from lit_klrb.functional import TokenStats, horvitz_thompson, kl_values
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import PolicyStudy, rounded
from lit_klrb.studies.pairs import ModelPair, PairStudy, sample_completions


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
        stats, mask, tokens, _ = sample_completions(module.pair, batch, sampling, seed)
        return estimates(stats, mask, tokens, completions, self.group_sizes)


@final
@dataclass(frozen=True, kw_only=True)
class PairEstimationStudy(PairStudy[ModelPair]):
    """Compares all KL estimates of given pairs of models on the same completions.

    For each pair the artifact has what `EstimationStudy` records of a snapshot, and

    - the exact KL of each prompt, if the models are enumerable, or else its Monte-Carlo estimate from a
      larger, independent sample: the standard by which a bias is judged;
    - the mean of q(y) / p(y) over the completions of each prompt. Its expectation is 1; the shortfall is the
      mass of the reference that the completions do not cover. The estimates with a control variate miss it,
      alpha times the shortfall in nats, without any sign of it in their standard errors;
    - the seconds that each estimate took: sampled tokens alone, or the whole vocabulary.

    Args:
        pairs: Pairs of models, each with its prompts.
        prompts: Number of prompts.
        completions: Completions per prompt; a multiple of every number in group_sizes.
        group_sizes: Numbers of completions (M) per estimate, for standard deviations.
        independent: Completions per prompt of the independent sample.
        tolerance: Largest bias that is regarded as none, as a fraction of the KL.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    name: ClassVar[str] = schema.ESTIMATION

    pairs: Sequence[ModelPair]
    prompts: int = 16
    completions: int = 200
    group_sizes: Sequence[int] = (1, 5, 10)
    independent: int = 2_000
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(2, prompts=self.prompts, independent=self.independent)
        check_group_sizes(self.completions, self.group_sizes)
        if not 0 < self.tolerance < 1:
            raise ConfigurationError(f"must be between 0 and 1, got {self.tolerance}", key="tolerance")

    @property
    def design(self) -> dict[str, Any]:
        """Numbers of prompts and completions, and what an analysis needs to know."""
        counts = {"prompts": self.prompts, "completions": self.completions}
        return {**counts, "group_sizes": list(self.group_sizes), "tolerance": self.tolerance}

    def snapshot(self, pair: ModelPair, seed: int) -> dict[str, Any]:
        """The estimates, the mass of the reference, seconds, and the exact KL or an independent estimate."""
        own = derive_seed(seed, self.name, "completions")
        stats, mask, tokens, seconds = pair.sample(self.prompts, self.completions, own)
        found = estimates(stats, mask, tokens, self.completions, self.group_sizes)
        stats = stats.masked(mask)
        ratio = (stats.ref_logprobs - stats.logprobs).sum(1).exp().view(self.prompts, -1)
        found["reference_mass"] = rounded(ratio.mean(1), 6)
        # Only the exact KL of every token needs all logits
        needs = {name: "statistics" if name == "rb" else "logprobs" for name in (*found["values"], "ht")}
        found["seconds"] = {
            name: float(f"{seconds[stage]:.3g}") for name, stage in {"sampling": "sampling", **needs}.items()
        }
        exact = pair.exact_kl(self.prompts)
        if exact is not None:
            return {**found, "exact": rounded(exact, 9)}
        other = derive_seed(seed, self.name, "independent")
        stats, mask, *_ = pair.sample(self.prompts, self.independent, other)
        stats = stats.masked(mask)
        log_ratio = (stats.logprobs - stats.ref_logprobs).sum(1).view(self.prompts, -1)
        error = log_ratio.std(1) / self.independent**0.5
        independent = {"mean": rounded(log_ratio.mean(1), 6), "standard_error": rounded(error, 6)}
        return {**found, "independent": independent}


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
        found = horvitz_thompson(values["k1"].flatten(), logprobs, tokens, mask, size)
        by_size[str(size)] = rounded(found.view(len(mask) // completions, -1), 6)
    by_name = {name: rounded(value, 6) for name, value in values.items()}
    return {"values": by_name, "horvitz_thompson": by_size}
