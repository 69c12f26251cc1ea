"""Batches of enumerated models: many policies with a reference each, and all their completions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, KLEstimator
from lit_klrb.functional import TokenStats, token_stats
from lit_klrb.functional.enumeration import TabularLM, num_prefixes

# Completions, or groups of them, of all models of a study: about a gigabyte.
MOST = 2_000_000


class Moments(NamedTuple):
    """Exact moments of a gradient from two completions, for each of S pairs of models.

    Args:
        mean: Expectation, shape [S, parameters].
        variance: Trace of the covariance, shape [S].
    """

    mean: Tensor
    variance: Tensor


def check_enumerable(vocabulary: int, max_length: int, models: int, group_size: int = 1) -> None:
    """Check that all groups of completions of some models can be enumerated.

    Raises:
        ConfigurationError: If there are too many, named by the maximum length.
    """
    completions = 1
    for _ in range(max_length):
        completions = 1 + (vocabulary - 1) * completions
        if models * completions**group_size > MOST:
            raise ConfigurationError(
                f"must be smaller, got {max_length} with {vocabulary} tokens: more than {MOST:,} "
                f"{'groups of ' if group_size > 1 else ''}completions would be enumerated",
                key="max_length",
            )


class TabularPairs:
    """S policies with a reference each, and all N completions.

    A table has one row of logits per prefix, or fewer: prefix i uses row `i % rows`, as in `TabularLM`.

    Args:
        policies: Logits, shape [S, rows, V].
        references: Logits, shape [S, rows, V]; their number of rows may differ.
        max_length: Maximum length of a completion.
        rewards: Reward of every completion, shape [S, N]; None for the KL alone.
    """

    def __init__(
        self, policies: Tensor, references: Tensor, max_length: int, rewards: Tensor | None = None
    ) -> None:
        self.policies, self.references, self.max_length = policies, references, max_length
        enumerable = TabularLM(policies[0].detach(), max_length)
        self.tokens, self.mask = enumerable.sequences()
        # Padding has no prefix of its own; any will do, as it is masked
        self.prefixes = enumerable.prefixes(self.tokens)
        self.rewards = rewards

    @classmethod
    def random(
        cls, seed: int, count: int, vocabulary: int, max_length: int, distance: float | None = None
    ) -> "TabularPairs":
        """Random pairs with random rewards, all standard normal.

        Args:
            seed: Seed of logits and rewards.
            count: Number of pairs (S).
            vocabulary: Tokens, EOS included.
            max_length: Maximum length of a completion.
            distance: Standard deviation of the policy's logits around the reference's; None for logits
                that do not depend on the reference's.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = 2, count, num_prefixes(vocabulary, max_length), vocabulary
        policies, references = torch.randn(shape, dtype=torch.float64, generator=generator)
        if distance is not None:
            policies = references + distance * policies
        pairs = cls(policies, references, max_length)
        pairs.rewards = torch.randn(count, len(pairs.tokens), dtype=torch.float64, generator=generator)
        return pairs

    def split(self) -> list["TabularPairs"]:
        """Each pair by itself."""
        rewards = [None] * len(self.policies) if self.rewards is None else self.rewards.split(1)
        tables = zip(self.policies.split(1), self.references.split(1), rewards, strict=True)
        return [TabularPairs(policy, reference, self.max_length, own) for policy, reference, own in tables]

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probability of every completion under S models, shape [S, N]."""
        chosen = logits.log_softmax(-1)[:, self.prefixes % logits.shape[1], self.tokens]
        return torch.where(self.mask, chosen, 0).sum(-1)

    def sample(self, count: int, seed: int) -> Tensor:
        """Indices of `count` completions of each policy, shape [S, count]; uniforms do not depend on it."""
        generator = torch.Generator().manual_seed(seed)
        return self.at(torch.rand(len(self.policies), count, dtype=torch.float64, generator=generator))

    @torch.no_grad()
    def at(self, uniforms: Tensor) -> Tensor:
        """Indices of the completions at uniform numbers, by each policy's inverse distribution function.

        Args:
            uniforms: Shape [S, K].
        """
        cumulative = self.logprobs(self.policies).exp().cumsum(-1)
        return torch.searchsorted(cumulative, uniforms).clamp(max=len(self.tokens) - 1)

    def loss(
        self,
        memory: EstimatorMemory,
        chosen: Tensor,
        *,
        group_size: int,
        beta: float | None = None,
        behaviour: Tensor | None = None,
        observe: bool = False,
    ) -> Tensor:
        """The sum over the models of an estimator's loss on completions with the given indices.

        Args:
            memory: The estimator, with what it remembers.
            chosen: Completions of each policy, in groups, shape [S, K].
            group_size: Completions per group.
            beta: Weight of the KL; None for the KL alone.
            behaviour: Logits of the policies that sampled the completions, shape [S, rows, V]; None for the
                current ones. The estimator's weights are computed under them.
            observe: Whether the completions are then remembered, which must be those of one policy.
        """
        model = torch.arange(len(chosen))[:, None].expand_as(chosen).flatten()
        row = chosen.flatten()
        tokens, mask = self.tokens[row], self.mask[row]
        estimator, token_values = memory.estimator, memory.token_values

        def logits(table: Tensor) -> Tensor:
            return table[model[:, None], self.prefixes[row] % table.shape[1]]

        def stats_of(table: Tensor) -> TokenStats:
            ref_logits = logits(self.references)
            return token_stats(
                logits(table),
                ref_logits,
                tokens,
                token_values=token_values,
                topk=estimator.topk,
                jsd_weight=estimator.reads_jsd,
            )

        weight = 1.0 if beta is None else beta
        rewards = None if beta is None or self.rewards is None else self.rewards[model, row]
        stats = stats_of(self.policies)
        sampled = (stats if behaviour is None else stats_of(behaviour)).detach()
        weights = memory.weights(sampled, mask, rewards, beta=weight, group_size=group_size, tokens=tokens)
        if observe:
            memory.observe(tokens, mask, rewards, sampled, group_size=group_size)
        old = None if behaviour is None else sampled.logprobs
        mean = estimator.loss(stats, mask, weights, beta=weight, behaviour_logprobs=old)
        return mean * len(chosen)

    def moments(
        self,
        estimator: KLEstimator | Sequence[EstimatorMemory],
        beta: float | None = None,
        behaviour: Tensor | None = None,
        group_size: int = 2,
    ) -> Moments:
        """Exact moments of the gradient from a group of completions: all groups are enumerated.

        Args:
            estimator: The estimator, or its memory of each policy. With several, each group is a rollout by
                itself, as coefficients are fitted across the groups of a rollout.
            beta: Weight of the KL; None for the KL alone.
            behaviour: Logits of the policies that sample; None for the current ones.
            group_size: Completions per group; N to its power are enumerated.
        """
        everything = torch.cartesian_prod(*[torch.arange(len(self.tokens))] * group_size)
        groups = everything.view(-1, group_size)
        memories = [EstimatorMemory(estimator)] if isinstance(estimator, KLEstimator) else estimator
        if len(memories) == 1:
            found = self._gradients(memories[0], groups, beta, behaviour)
        else:
            olds = [None] * len(memories) if behaviour is None else behaviour.split(1)
            each = zip(memories, self.split(), olds, strict=True)
            alone = [
                [one._gradients(memory, group[None], beta, old) for group in groups]
                for memory, one, old in each
            ]
            found = torch.cat([torch.cat(of_one, dim=1) for of_one in alone])
        logprobs = self.logprobs(self.policies if behaviour is None else behaviour)
        weights = logprobs[:, groups].sum(-1).exp()[..., None]
        mean = (weights * found).sum(1)
        return Moments(mean, (weights * (found - mean[:, None]).square()).sum((1, 2)))

    def _gradients(
        self, memory: EstimatorMemory, groups: Tensor, beta: float | None, behaviour: Tensor | None
    ) -> Tensor:
        """The gradient from each of G groups for each pair, shape [S, G, parameters]."""
        # Every group has its own copy of the policy's table, so one backward pass gives all gradients
        copies = self.policies.repeat_interleave(len(groups), dim=0).requires_grad_()
        copied = TabularPairs(copies, _repeated(self.references, len(groups)), self.max_length)
        if self.rewards is not None:
            copied.rewards = _repeated(self.rewards, len(groups))
        chosen = groups.repeat(len(self.policies), 1)
        old = None if behaviour is None else _repeated(behaviour, len(groups))
        loss = copied.loss(memory, chosen, group_size=groups.shape[1], beta=beta, behaviour=old)
        (found,) = torch.autograd.grad(loss, copies, materialize_grads=True)
        return found.view(len(self.policies), len(groups), -1)

    def exact_loss(self, beta: float | None = None) -> Tensor:
        """The sum over the models of the exact KL, or of beta KL - E[reward]."""
        logprobs, ref_logprobs = self.logprobs(self.policies), self.logprobs(self.references)
        penalty = logprobs - ref_logprobs
        if beta is not None and self.rewards is not None:
            penalty = beta * penalty - self.rewards
        return (logprobs.exp() * penalty).sum()

    def exact_gradient(self, beta: float | None = None, *, reverse: bool = False) -> Tensor:
        """Gradient of `exact_loss`, or of KL(reference || policy), shape [S, parameters]."""
        leaf = self.policies.detach().requires_grad_()
        pairs = TabularPairs(leaf, self.references, self.max_length, self.rewards)
        loss = pairs.exact_kl(reverse=True).sum() if reverse else pairs.exact_loss(beta)
        return torch.autograd.grad(loss, leaf)[0].flatten(1)

    def exact_kl(self, *, reverse: bool = False) -> Tensor:
        """KL(policy || reference) of each pair, or the reverse, in nats per completion, shape [S]."""
        logprobs, ref_logprobs = self.logprobs(self.policies), self.logprobs(self.references)
        if reverse:
            logprobs, ref_logprobs = ref_logprobs, logprobs
        return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)

    def kl_to_optimum(self, beta: float) -> Tensor:
        """KL of each policy to the maximiser of E[reward] - beta KL, in nats per completion, shape [S]."""
        assert self.rewards is not None
        logprobs = self.logprobs(self.policies)
        optimum = (self.logprobs(self.references) + self.rewards / beta).log_softmax(-1)
        return (logprobs.exp() * (logprobs - optimum)).sum(-1)


def _repeated(values: Tensor, times: int) -> Tensor:
    return values.repeat_interleave(times, dim=0)
