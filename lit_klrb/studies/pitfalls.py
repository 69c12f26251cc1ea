"""The tabular experiments of Tang and Munos (2025): gradients of KL estimates, and where they lead."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import (
    K1Loss,
    K2Loss,
    K3Loss,
    K3LossSequence,
    K3Reward,
    KLEstimator,
    MonteCarlo,
    MonteCarloRewardToGo,
    RaoBlackwell,
    RaoBlackwellControlVariate,
    RaoBlackwellLite,
    RaoBlackwellLoss,
    RaoBlackwellReward,
)
from lit_klrb.functional import token_stats
from lit_klrb.functional.enumeration import TabularLM, num_prefixes
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import rounded

# Completions of a prompt: the smallest number with a leave-one-out baseline, so all groups are enumerated.
_PAIR = 2
# Estimators with coefficients fitted on other prompts.
FITTED = (RaoBlackwellControlVariate,)


def _estimators() -> list[KLEstimator]:
    unbiased = [MonteCarlo(), MonteCarloRewardToGo(), RaoBlackwell(), RaoBlackwellLite()]
    biased = (K1Loss, K2Loss, K3Loss, K3LossSequence, K3Reward, RaoBlackwellLoss, RaoBlackwellReward)
    return [*unbiased, *(kind(allow_biased=True) for kind in biased)]


@final
@dataclass(frozen=True, kw_only=True)
class PitfallsStudy:
    """Compares estimators on models so small that every completion is enumerated.

    The models have one row of logits per prefix, drawn from a standard normal distribution. Three parts:

    - gradients: for each of many pairs of a random policy and a random reference, the expectation and the
      variance of each estimator's gradient of KL(policy || reference), for two completions with the
      leave-one-out baseline. Both are exact: all pairs of completions are enumerated;
    - kl: gradient descent on the KL alone, with the exact gradient and with each estimator's on sampled
      completions. Recorded are the exact KL(policy || reference) and KL(reference || policy);
    - objective: the same for E[reward] - beta KL with random rewards. Recorded is the exact
      KL(policy || optimum), which is (J(optimum) - J(policy)) / beta.

    Args:
        estimators: Estimators to compare, of different classes; by default the unbiased ones, and biased
            ones in use. Estimators with coefficients fitted on other prompts are refused.
        vocabulary: Tokens, EOS included.
        max_length: Maximum length of a completion.
        policies: Pairs of models in the first part.
        runs: Runs of gradient descent in the second and third, each from models of its own.
        steps: Steps of gradient descent, without momentum.
        records: Number of points of each curve after the start; must divide steps.
        learning_rate: Step size.
        completions: Completions per step, in pairs.
        beta: Weight of the KL in the third part, in units of reward per nat.

    Raises:
        ConfigurationError: If a number is out of range or two estimators are of the same class.

    Reference: Tang, Munos (2025), arXiv:2506.09477, Section 5.
    """

    name: ClassVar[str] = schema.PITFALLS

    estimators: Sequence[KLEstimator] | None = None
    vocabulary: int = 3
    max_length: int = 3
    policies: int = 100
    runs: int = 20
    steps: int = 200
    records: int = 20
    learning_rate: float = 0.5
    completions: int = 16
    beta: float = 0.5

    def __post_init__(self) -> None:
        least = {"vocabulary": 2, "max_length": 1, "policies": 2, "runs": 2, "records": 1, "completions": 2}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigurationError(f"must be at least {bound}, got {getattr(self, name)}", key=name)
        if self.completions % _PAIR:
            raise ConfigurationError(f"must be even, got {self.completions}", key="completions")
        if self.steps < 1 or self.steps % self.records:
            raise ConfigurationError(
                f"must be a multiple of records={self.records}, got {self.steps}", key="steps"
            )
        for name in ("learning_rate", "beta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"must be positive and finite, got {getattr(self, name)}", key=name)
        names = [type(estimator).__name__ for estimator in self.compared]
        if not names or len(set(names)) < len(names):
            raise ConfigurationError(f"must be of different classes, got {names}", key="estimators")
        # All models are one batch here: coefficients fitted across prompts would be fitted across models
        fitted = [name for name, one in zip(names, self.compared, strict=True) if isinstance(one, FITTED)]
        if fitted:
            raise ConfigurationError(
                f"{', '.join(fitted)} fits coefficients on other prompts, of which there are none here",
                key="estimators",
            )

    @property
    def compared(self) -> Sequence[KLEstimator]:
        """The estimators compared."""
        return _estimators() if self.estimators is None else self.estimators

    def measure(self, seed: int) -> dict[str, Any]:
        """The artifact: design, and the numbers of each part by estimator.

        Args:
            seed: Determines models, rewards and completions; the same for all estimators.
        """
        named = {type(estimator).__name__: estimator for estimator in self.compared}
        descents: dict[str, KLEstimator | None] = {schema.ANALYTIC: None, **named}
        return {
            "schema": 1,
            "vocabulary": self.vocabulary,
            "max_length": self.max_length,
            "learning_rate": self.learning_rate,
            "completions": self.completions,
            "beta": self.beta,
            "steps": list(range(0, self.steps + 1, self.steps // self.records)),
            "gradients": {name: self._gradients(seed, estimator) for name, estimator in named.items()},
            "kl": {name: self._descend(seed, estimator, beta=None) for name, estimator in descents.items()},
            "objective": {
                name: self._descend(seed, estimator, beta=self.beta) for name, estimator in descents.items()
            },
        }

    def _models(self, seed: int, part: str, count: int) -> "_Models":
        """`count` random policies with their references and rewards."""
        generator = torch.Generator().manual_seed(derive_seed(seed, self.name, part))
        prefixes = num_prefixes(self.vocabulary, self.max_length)
        shape = 2, count, prefixes, self.vocabulary
        policies, references = torch.randn(shape, dtype=torch.float64, generator=generator)
        models = _Models(policies, references, self.max_length)
        models.rewards = torch.randn(count, len(models.tokens), dtype=torch.float64, generator=generator)
        return models

    def _gradients(self, seed: int, estimator: KLEstimator) -> dict[str, Any]:
        """Exact expectation and variance of the gradient from two completions, for each pair of models."""
        models = self._models(seed, "gradients", self.policies)
        count, number = len(models.policies), len(models.tokens)
        first, second = torch.cartesian_prod(torch.arange(number), torch.arange(number)).T
        pair = torch.stack([first, second], dim=1)  # [N^2, 2], the rows of one prompt next to each other
        # Every pair has its own copy of the policy's table, so one backward pass gives all gradients
        copies = models.policies.repeat_interleave(len(pair), dim=0).requires_grad_()
        references = models.references.repeat_interleave(len(pair), dim=0)
        everything = _Models(copies, references, self.max_length)
        loss = everything.loss(estimator, pair.repeat(count, 1), beta=None)
        (found,) = torch.autograd.grad(loss, copies, materialize_grads=True)
        found = found.view(count, len(pair), -1)

        logprobs = models.logprobs(models.policies)
        weights = (logprobs[:, first] + logprobs[:, second]).exp()[..., None]
        mean = (weights * found).sum(1)
        variance = (weights * (found - mean[:, None]).square()).sum((1, 2))
        forward, reverse = models.kl_gradients()
        size = forward.norm(dim=1)
        return {
            "bias": rounded((mean - forward).norm(dim=1) / size, 6),
            "noise": rounded(variance.sqrt() / size, 6),
            "cosine": [_cosine(*rows) for rows in zip(mean, forward, strict=True)],
            "reverse_cosine": [_cosine(*rows) for rows in zip(mean, reverse, strict=True)],
        }

    def _descend(self, seed: int, estimator: KLEstimator | None, beta: float | None) -> dict[str, Any]:
        """Gradient descent with an estimator, or with the exact gradient if it is None.

        Returns:
            The distances of `_Models.distances` by name, shape [runs, records + 1] each.
        """
        models = self._models(seed, "descent", self.runs)
        recorded = [models.distances(beta)]
        for step in range(1, self.steps + 1):
            models.policies.requires_grad_()
            if estimator is None:
                loss = models.exact_loss(beta)
            else:
                generator = torch.Generator().manual_seed(derive_seed(seed, self.name, "completions", step))
                loss = models.loss(estimator, models.sample(self.completions, generator), beta)
            (gradient,) = torch.autograd.grad(loss, models.policies, materialize_grads=True)
            models.policies = (models.policies - self.learning_rate * gradient).detach()
            if step % (self.steps // self.records) == 0:
                recorded.append(models.distances(beta))
        return {name: rounded(torch.stack([one[name] for one in recorded], dim=1), 6) for name in recorded[0]}


class _Models:
    """S policies with a reference each, and all N completions.

    Args:
        policies: Logits of every prefix, shape [S, prefixes, V].
        references: Logits of every prefix, shape [S, prefixes, V].
        max_length: Maximum length of a completion.
    """

    def __init__(self, policies: Tensor, references: Tensor, max_length: int) -> None:
        self.policies, self.references = policies, references
        enumerable = TabularLM(policies[0].detach(), max_length)
        self.tokens, self.mask = enumerable.sequences()
        # Padding has no prefix of its own; any will do, as it is masked
        self.prefixes = enumerable.prefixes(self.tokens) % policies.shape[1]
        self.rewards: Tensor  # of every completion, shape [S, N]

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probability of every completion under S models, shape [S, N]."""
        chosen = logits.log_softmax(-1)[:, self.prefixes, self.tokens]
        return torch.where(self.mask, chosen, 0).sum(-1)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Indices of `count` completions of each policy, shape [S, count]; uniforms do not depend on it."""
        cumulative = self.logprobs(self.policies.detach()).exp().cumsum(-1)
        uniforms = torch.rand(len(cumulative), count, dtype=torch.float64, generator=generator)
        return torch.searchsorted(cumulative, uniforms).clamp(max=len(self.tokens) - 1)

    def loss(self, estimator: KLEstimator, chosen: Tensor, beta: float | None) -> Tensor:
        """The sum over the models of an estimator's loss on completions with the given indices [S, K].

        Args:
            estimator: The estimator.
            chosen: Completions of each policy, in pairs.
            beta: Weight of the KL; None for the KL alone.
        """
        model = torch.arange(len(chosen))[:, None].expand_as(chosen).flatten()
        row = chosen.flatten()
        tokens, mask, prefixes = self.tokens[row], self.mask[row], self.prefixes[row]
        logits, ref_logits = (table[model[:, None], prefixes] for table in (self.policies, self.references))
        stats = token_stats(logits, ref_logits, tokens, topk=estimator.topk)
        if beta is None:
            mean = estimator.surrogate(stats, mask, group_size=_PAIR)
        else:
            rewards = self.rewards[model, row]
            mean = estimator.objective(stats, mask, rewards, beta=beta, group_size=_PAIR)
        return mean * len(chosen)

    def exact_loss(self, beta: float | None) -> Tensor:
        """The sum over the models of the exact KL, or of beta KL - E[reward]."""
        logprobs, ref_logprobs = self.logprobs(self.policies), self.logprobs(self.references)
        penalty = logprobs - ref_logprobs
        if beta is not None:
            penalty = beta * penalty - self.rewards
        return (logprobs.exp() * penalty).sum()

    def kl_gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of KL(policy || reference) and of the reverse KL, shape [S, parameters] each."""
        leaf = self.policies.detach().requires_grad_()
        logprobs, ref_logprobs = self.logprobs(leaf), self.logprobs(self.references)
        forward = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
        reverse = (ref_logprobs.exp() * (ref_logprobs - logprobs)).sum()
        first, second = (torch.autograd.grad(kl, leaf, retain_graph=True)[0] for kl in (forward, reverse))
        return first.flatten(1), second.flatten(1)

    @torch.no_grad()
    def distances(self, beta: float | None) -> dict[str, Tensor]:
        """Both KLs between policy and reference, or the KL of the policy to the optimum, shape [S] each."""
        logprobs, ref_logprobs = self.logprobs(self.policies), self.logprobs(self.references)
        if beta is not None:
            optimum = (ref_logprobs + self.rewards / beta).log_softmax(-1)
            return {"to_optimum": (logprobs.exp() * (logprobs - optimum)).sum(-1)}
        return {
            "forward": (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1),
            "reverse": (ref_logprobs.exp() * (ref_logprobs - logprobs)).sum(-1),
        }


def _cosine(found: Tensor, true: Tensor) -> float | None:
    """The cosine of two gradients; None if the first is zero up to rounding."""
    if found.norm() < 1e-9 * true.norm():
        return None
    cosine: float = rounded(torch.nn.functional.cosine_similarity(found, true, dim=0), 6)
    return cosine
