"""All KL estimates on the same completions of given pairs of models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.functional import TopK
from lit_klrb.functional.topk import head_excess, kl_topk
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import rounded
from lit_klrb.studies.estimation import check_group_sizes, estimates
from replication.studies.model_pairs import ModelPair, PairStudy


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
        topk: Adds two estimates from the policy's k most likely tokens: `topk`, which is `kl_topk`, and
            `topk_head`, its sum over them without the term of the sampled token, too small by the other
            tokens' summands; null for neither.

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
    topk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(2, prompts=self.prompts, independent=self.independent)
        check_group_sizes(self.completions, self.group_sizes)
        if not 0 < self.tolerance < 1:
            raise ConfigurationError(f"must be between 0 and 1, got {self.tolerance}", key="tolerance")
        if self.topk is not None:
            check_at_least(1, topk=self.topk)

    @property
    def design(self) -> dict[str, Any]:
        """Numbers of prompts and completions, and what an analysis needs to know."""
        counts = {"prompts": self.prompts, "completions": self.completions}
        head = {} if self.topk is None else {"topk": self.topk}
        return {**counts, "group_sizes": list(self.group_sizes), "tolerance": self.tolerance, **head}

    def snapshot(self, pair: ModelPair, seed: int) -> dict[str, Any]:
        """The estimates, the mass of the reference, seconds, and the exact KL or an independent estimate."""
        own = derive_seed(seed, self.name, "completions")
        head = None if self.topk is None else TopK(self.topk)
        stats, mask, tokens, seconds = pair.sample(self.prompts, self.completions, own, head)
        found = estimates(stats, mask, tokens, self.completions, self.group_sizes)
        stats = stats.masked(mask)
        if head is not None:
            sums = {"topk": kl_topk(stats), "topk_head": head_excess(stats)}
            shape = (self.prompts, -1)
            found["values"] |= {name: rounded(of.sum(1).view(shape), 6) for name, of in sums.items()}
        ratio = (stats.ref_logprobs - stats.logprobs).sum(1).exp().view(self.prompts, -1)
        found["reference_mass"] = rounded(ratio.mean(1), 6)
        # Only the exact KL of every token, and a head, need all logits
        needs = {"sampling": "sampling", "rb": "statistics", "topk": "topk", "topk_head": "topk"}
        stages = {name: needs.get(name, "logprobs") for name in ("sampling", *found["values"], "ht")}
        found["seconds"] = {name: float(f"{seconds[stage]:.3g}") for name, stage in stages.items()}
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
