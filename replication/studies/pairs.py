"""Pairs of enumerated models, for the studies of estimates of the KL."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.functional import TopK, token_stats
from lit_klrb.seeding import derive_seed
from replication.studies.model_pairs import ModelPair, Sample, timed
from replication.studies.tabular import TabularPairs


@final
@dataclass(frozen=True, kw_only=True)
class EnumerablePair(ModelPair):
    """Random models so small that every completion is enumerated; each prompt is a pair of its own.

    Args:
        vocabulary: Tokens, EOS included.
        max_length: Maximum length of a completion.
        distance: Standard deviation of the policy's logits around the reference's.
        models_seed: Seed of the models.
    """

    vocabulary: int = 4
    max_length: int = 4
    distance: float = 1.0
    models_seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(2, vocabulary=self.vocabulary)
        check_at_least(1, max_length=self.max_length)
        if not self.distance > 0:
            raise ConfigurationError(f"must be positive, got {self.distance}", key="distance")

    @property
    @override
    def label(self) -> str:
        return f"enumerated, distance {self.distance:g}"

    def models(self, prompts: int) -> TabularPairs:
        """The pairs of models, one per prompt."""
        seed = derive_seed(self.models_seed, "enumerable pair")
        return TabularPairs.random(seed, prompts, self.vocabulary, self.max_length, self.distance)

    @override
    def sample(
        self, prompts: int, completions: int, seed: int, topk: TopK | None = None, *, stratum: int = 1
    ) -> Sample:
        pairs, seconds = self.models(prompts), dict[str, float]()
        with timed(seconds, "sampling"):
            generator = torch.Generator().manual_seed(seed)
            uniforms = torch.rand(prompts, completions, dtype=torch.float64, generator=generator)
            uniforms = stratified_uniforms(uniforms.view(-1, stratum)).view(prompts, completions)
            chosen = _at(pairs, uniforms).flatten()
        tokens, mask, prefixes = (values[chosen] for values in (pairs.tokens, pairs.mask, pairs.prefixes))
        model = torch.arange(prompts).repeat_interleave(completions)[:, None]
        logits, ref_logits = (
            table[model, prefixes % table.shape[1]] for table in (pairs.policies, pairs.references)
        )
        with timed(seconds, "logprobs"):
            for table in (logits, ref_logits):
                table.log_softmax(-1).gather(-1, tokens[..., None])
        with timed(seconds, "statistics"):
            stats = token_stats(logits, ref_logits, tokens, topk=topk)
        seconds["topk"] = seconds["statistics"]
        return Sample(stats, mask, tokens, seconds)

    @override
    def exact_kl(self, prompts: int) -> Tensor:
        return self.models(prompts).exact_kl()


def _at(pairs: TabularPairs, uniforms: Tensor) -> Tensor:
    """Indices of the completions at uniform numbers [P, K], in lexicographic order of the completions.

    In that order, completions with a common prefix are neighbours, as in sampling token by token.
    """
    places = pairs.policies.shape[-1] ** torch.arange(pairs.tokens.shape[1] - 1, -1, -1)
    order = (pairs.tokens * places).sum(1).argsort()
    cumulative = pairs.logprobs(pairs.policies)[:, order].exp().cumsum(1)
    return order[torch.searchsorted(cumulative, uniforms).clamp(max=len(order) - 1)]


def stratified_uniforms(uniforms: Tensor) -> Tensor:
    """K evenly spaced numbers per row with one random shift, the row's first number, shape [P, K].

    Example:
        >>> stratified_uniforms(torch.tensor([[0.75, 0.1]])).tolist()
        [[0.75, 0.25]]
    """
    steps = torch.arange(uniforms.shape[1], dtype=uniforms.dtype, device=uniforms.device)
    return (uniforms[:, :1] + steps / uniforms.shape[1]) % 1
