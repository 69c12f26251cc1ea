"""Facts about estimators in the literature, computed exactly on enumerated models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lit_klrb.errors import check_at_least
from lit_klrb.estimators import (
    CoarsenedTopK,
    K2Loss,
    KLEstimator,
    MonteCarlo,
    RaoBlackwell,
    RaoBlackwellLoss,
    RaoBlackwellTopK,
)
from lit_klrb.functional import TokenStats, token_stats
from lit_klrb.functional.enumeration import TabularLM, exact_kl, optimal_policy
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import rounded
from replication import schema
from replication.names_in_use import NAMES_IN_USE
from replication.studies.base import Study
from replication.studies.baselines import shrinkage_variances, token_baseline_variances
from replication.studies.stratified import stratified_moments
from replication.studies.tabular import TabularPairs
from replication.topk_rivals import (
    TopKBaseline,
    TopKDetachedTail,
    TopKHeadOnly,
    TopKRenormalised,
    TopKTruncated,
    TopKWeightedTail,
)

# One position with a large vocabulary: its size, the head, and the policy's distance from the reference.
_WIDE, _HEADS, _DISTANCES = 200, (1, 8, 32, 128, 200), (0.1, 0.5, 1.0)
_TOPK: dict[str, type[Any]] = {
    "exact head, sampled tail": RaoBlackwellTopK,
    "truncated": TopKTruncated,
    "renormalised": TopKRenormalised,
    "tail bucket": CoarsenedTopK,
    "head only": TopKHeadOnly,
    "detached tail": TopKDetachedTail,
    "weighted tail": TopKWeightedTail,
    "baseline": TopKBaseline,
}
# Where on the path from the reference (0) to the optimum (1) the whole gradient is examined.
_PATH = (0.0, 0.5, 0.9, 0.99)


@final
@dataclass(frozen=True, kw_only=True)
class IdentitiesStudy(Study):
    """Computes what papers state about estimators, for the ledger of claims in docs/claims.

    Everything is exact up to rounding, on random models so small that every completion is enumerated; only
    the shrinkage of baselines is simulated.

    Args:
        models: Number of random pairs of models.
        batches: Number of simulated batches, where groups are too many to be enumerated.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    name: ClassVar[str] = schema.IDENTITIES

    models: int = 100
    batches: int = 4_000

    def __post_init__(self) -> None:
        check_at_least(2, models=self.models, batches=self.batches)

    def parts(self, seed: int) -> Mapping[str, Callable[[], Any]]:
        """One part per fact."""
        address = derive_seed(seed, self.name)
        small = TabularPairs.random(address, self.models, vocabulary=3, max_length=3)
        near = TabularPairs.random(address, self.models, vocabulary=3, max_length=3, distance=0.3)
        few = TabularPairs.random(address, min(self.models, 20), vocabulary=3, max_length=3)
        return {
            "worked_examples": _worked_examples,
            "values": partial(_values, {"near": near, "far": small}),
            "counterexample": _counterexample,
            "gradients": partial(_gradients, {"near": near, "far": small}),
            "path": partial(_path, few),
            "names": partial(_names, address),
            "token_level": partial(_token_level, small, address),
            "topk": partial(_topk, address),
            "stratified": partial(stratified_moments, few, (2, 4, 8)),
            "token_baseline": partial(token_baseline_variances, small),
            "shrinkage": partial(shrinkage_variances, address, self.batches),
        }

    def artifact(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The facts by name."""
        return {"schema": 1, "models": self.models, "batches": self.batches, **parts}


def _worked_examples() -> dict[str, float]:
    """A coin of 0.7 against a fair one, in nats, and the log ratio of a token of 0.25 against 0.05."""
    coins = [TabularLM(torch.tensor([[a, 1 - a]], dtype=torch.float64).log(), 1) for a in (0.7, 0.5)]
    return {"coins": exact_kl(*coins).item(), "log_ratio": torch.tensor(0.25 / 0.05).log().item()}


def _statistics(pairs: TabularPairs) -> tuple[Tensor, Tensor, Tensor]:
    """Probability, sum of log ratios and sum of exact KLs of every completion, shape [S, N] each."""
    logits, ref_logits = (
        table[:, pairs.prefixes % table.shape[1]] for table in (pairs.policies, pairs.references)
    )
    tokens = pairs.tokens.expand(len(logits), -1, -1)
    flat = token_stats(logits.flatten(0, 1), ref_logits.flatten(0, 1), tokens.flatten(0, 1))
    stats = flat.masked(pairs.mask.repeat(len(logits), 1))
    assert stats.kl is not None
    shape = len(logits), -1
    log_ratio = (stats.logprobs - stats.ref_logprobs).sum(1).view(shape)
    return stats.logprobs.sum(1).exp().view(shape), log_ratio, stats.kl.sum(1).view(shape)


def _variance(probabilities: Tensor, values: Tensor) -> Tensor:
    mean = (probabilities * values).sum(1, keepdim=True)
    return (probabilities * (values - mean).square()).sum(1)


def _values(cases: Mapping[str, TabularPairs]) -> dict[str, Any]:
    """Variances of single estimates by Monte Carlo and Rao-Blackwell, for each pair of models."""
    found = {}
    for name, pairs in cases.items():
        probabilities, k1, rb = _statistics(pairs)
        variances = {"k1": _variance(probabilities, k1), "rb": _variance(probabilities, rb)}
        found[name] = {kind: rounded(variance, 6) for kind, variance in variances.items()}
    return found


def _counterexample() -> dict[str, float]:
    """Two tokens whose log ratio is the same in all completions, while their exact KLs are not."""
    impossible = 1e-300
    policy = torch.tensor([[impossible, 0.5, 0.5], [impossible, 0.5, 0.5], [impossible, 1.0, impossible]])
    reference = torch.tensor([[impossible, 0.3, 0.7], [impossible, 0.5, 0.5], [impossible, 3 / 7, 4 / 7]])
    logits, ref_logits = (table.double().clamp(min=impossible).log()[None] for table in (policy, reference))
    probabilities, k1, rb = _statistics(TabularPairs(logits, ref_logits, max_length=2))
    return {"k1": _variance(probabilities, k1).item(), "rb": _variance(probabilities, rb).item()}


def _gradients(cases: Mapping[str, TabularPairs]) -> dict[str, Any]:
    """Traces of the covariance of the KL's gradient from two completions, for each pair of models."""
    estimators = {"MonteCarlo": MonteCarlo(), "RaoBlackwell": RaoBlackwell()}
    return {
        name: {kind: rounded(pairs.moments(one).variance, 6) for kind, one in estimators.items()}
        for name, pairs in cases.items()
    }


def _path(pairs: TabularPairs, beta: float = 0.5) -> dict[str, Any]:
    """Variance of the whole gradient on the way from the reference to the optimum, [points][models]."""
    assert pairs.rewards is not None
    found: dict[str, list[Any]] = {"MonteCarlo": [], "RaoBlackwell": []}
    for place in _PATH:
        tables = [
            optimal_policy(TabularLM(table, pairs.max_length), reward, beta / place).logits
            if place
            else table
            for table, reward in zip(pairs.references, pairs.rewards, strict=True)
        ]
        here = TabularPairs(torch.stack(tables), pairs.references, pairs.max_length, pairs.rewards)
        for name, estimator in (("MonteCarlo", MonteCarlo()), ("RaoBlackwell", RaoBlackwell())):
            found[name].append(rounded(here.moments(estimator, beta).variance, 6))
    return {"places": list(_PATH), **found}


def _names(seed: int) -> dict[str, float]:
    """Largest difference between the gradient of each loss in use and that of its estimator here."""
    generator = torch.Generator().manual_seed(seed)
    p, q, old = torch.randn(3, 64, 6, dtype=torch.float64, generator=generator) - 2
    mask = torch.ones_like(p, dtype=torch.bool)
    found = {}
    for entry in NAMES_IN_USE:
        behaviour = old if entry.off_policy != "none" else p
        leaf = p.clone().requires_grad_()
        (theirs,) = torch.autograd.grad(entry.loss(leaf, q, behaviour).sum() / len(p), leaf)
        stats = TokenStats(p.clone().requires_grad_(), q)
        estimator = entry.estimator(off_policy=entry.off_policy)
        given = None if entry.off_policy == "none" else behaviour
        weights = estimator.weights(stats.detach(), mask, group_size=2)
        loss = estimator.loss(stats, mask, weights, behaviour_logprobs=given)
        (ours,) = torch.autograd.grad(loss, stats.logprobs)
        found[entry.name] = (theirs - ours).abs().max().item()
    return found


def _relative(found: Tensor, true: Tensor) -> Tensor:
    return (found - true).norm(dim=1) / true.norm(dim=1)


def _token_level(pairs: TabularPairs, seed: int) -> dict[str, Any]:
    """Bias of k2 in the loss: of the sequence's KL, of its token-level part, and with one token."""
    mean, token_level = (
        pairs.moments(one, group_size=1).mean
        for one in (K2Loss(baseline=None), RaoBlackwellLoss(baseline=None))
    )
    single = TabularPairs.random(seed, len(pairs.policies), vocabulary=5, max_length=1)
    one_token = single.moments(K2Loss(baseline=None), group_size=1).mean
    return {
        "to_sequence": rounded(_relative(mean, pairs.exact_gradient()), 6),
        "to_token_level": rounded(_relative(mean, token_level), 6),
        "one_token": rounded(_relative(one_token, single.exact_gradient()), 6),
    }


def _topk(seed: int) -> dict[str, Any]:
    """Bias and variance of top-k estimates at one position, by distance, head and estimate.

    The reference's probabilities are proportional to 1 / rank.
    """
    generator = torch.Generator().manual_seed(seed)
    reference = -torch.arange(1, _WIDE + 1, dtype=torch.float64).log()[None, None]
    noise = torch.randn(1, 1, _WIDE, dtype=torch.float64, generator=generator)
    return {
        f"{distance:g}": _topk_at(TabularPairs(reference + distance * noise, reference, max_length=1))
        for distance in _DISTANCES
    }


def _topk_at(pairs: TabularPairs) -> dict[str, Any]:
    exact, kl = pairs.exact_gradient(), pairs.exact_kl().item()
    sampled = pairs.moments(K2Loss(baseline=None), group_size=1).variance
    found: dict[str, Any] = {"kl": kl, "estimates": {}}
    for name, kind in _TOPK.items():
        rows = [_topk_row(pairs, kind(k=k, discount=0.0, baseline=None), exact, sampled) for k in _HEADS]
        found["estimates"][name] = dict(zip(map(str, _HEADS), rows, strict=True))
    return found


def _topk_row(
    pairs: TabularPairs, estimator: KLEstimator, exact: Tensor, sampled: Tensor
) -> dict[str, float]:
    """Bias of value (nats) and gradient (of its norm), variance over that of the sampled token's k1."""
    mean, variance = pairs.moments(estimator, group_size=1)
    logits, ref_logits = (table.expand(_WIDE, 1, _WIDE) for table in (pairs.policies, pairs.references))
    values = estimator.value(token_stats(logits, ref_logits, pairs.tokens, topk=estimator.topk), pairs.mask)
    probabilities = pairs.logprobs(pairs.policies)[0].exp()
    return {
        "value_bias": float(f"{(probabilities @ values - pairs.exact_kl()).item():.6g}"),
        "least_value": float(f"{values.min().item():.6g}"),
        "gradient_bias": float(f"{_relative(mean, exact).item():.6g}"),
        "variance": float(f"{(variance / sampled).item():.6g}"),
    }
