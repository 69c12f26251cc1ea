"""Expected gradients of estimators, by enumeration of every group of completions of small models."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lit_klrb.estimators import KLEstimator
from lit_klrb.functional import TokenStats, token_stats
from lit_klrb.functional.enumeration import TabularLM


@dataclass(frozen=True)
class Case:
    """A policy p, the reference q, the policy p_old that generated, and a reward for each completion."""

    policy: TabularLM
    reference: TabularLM
    behaviour: TabularLM
    rewards: Tensor

    @classmethod
    def random(cls, contexts: int, vocab_size: int, max_length: int, seed: int) -> "Case":
        generator = torch.Generator().manual_seed(seed)

        def table(scale: float) -> Tensor:
            return scale * torch.randn(contexts, vocab_size, dtype=torch.float64, generator=generator)

        old, reference = table(1.0), table(1.0)
        policy, behaviour, ref = (TabularLM(t, max_length) for t in (old + table(0.3), old, reference))
        rewards = torch.randn(len(policy.sequences()[0]), dtype=torch.float64, generator=generator)
        return cls(policy, ref, behaviour, rewards)

    @cached_property
    def sequences(self) -> tuple[Tensor, Tensor]:
        return self.policy.sequences()

    def stats(self, logits: Tensor) -> TokenStats:
        tokens, _ = self.sequences
        policy = TabularLM(logits, self.policy.max_length)
        return token_stats(policy.token_logits(tokens), self.reference.token_logits(tokens), tokens)

    def groups(self, size: int) -> Tensor:
        """Every group of `size` completions, as indices of completions, shape [groups, size]."""
        completions = torch.arange(len(self.sequences[0]))
        return torch.cartesian_prod(*[completions] * size).view(-1, size)


@dataclass(frozen=True)
class Variation:
    """What must not matter: where the batch is cut, and what padding holds."""

    micro_batches: int = 1
    junk: float = 0.0


def expected_gradient(
    case: Case,
    estimator: KLEstimator,
    group_size: int,
    *,
    off_policy: bool = False,
    beta: float | None = None,
    stale_weights: bool = False,
    variation: Variation = Variation(),
) -> Tensor:
    """The exact expectation of the estimator's gradient in the policy's logits, [contexts, V].

    All groups form one batch; each row's gradient in the statistics is weighted by the probability of its
    group before it is carried on to the logits.

    Args:
        case: Models and rewards.
        estimator: What is under test.
        group_size: Completions per group.
        off_policy: Draw from `case.behaviour` rather than from the policy.
        beta: With rewards and this weight; None for the surrogate of the KL alone.
        stale_weights: Compute `weights` at the behaviour policy, as for later inner epochs.
        variation: What must not matter.
    """
    groups = case.groups(group_size)
    rows = groups.flatten()
    mask = case.sequences[1][rows]
    logits = case.policy.logits.clone().requires_grad_()
    current, generated = case.stats(logits), case.stats(case.behaviour.logits)

    def batch(stats: TokenStats) -> TokenStats:
        return TokenStats(*(torch.where(mask, field[rows], variation.junk) for field in stats))

    leaf = TokenStats(*(field.detach().requires_grad_() for field in batch(current)))
    behaviour = batch(generated).logprobs if off_policy else None
    weights = estimator.weights(
        batch(generated) if stale_weights else leaf,
        mask,
        None if beta is None else case.rewards[rows],
        beta=1.0 if beta is None else beta,
        group_size=group_size,
    )
    for part in torch.arange(len(rows)).chunk(variation.micro_batches):
        loss = estimator.loss(
            TokenStats(*(field[part] for field in leaf)),
            mask[part],
            weights[part],
            beta=1.0 if beta is None else beta,
            behaviour_logprobs=None if behaviour is None else behaviour[part],
        )
        (loss * len(part)).backward() if loss.requires_grad else None

    generator_stats = generated if off_policy else current.detach()
    log_probability = torch.where(case.sequences[1], generator_stats.logprobs, 0).sum(-1)
    probability = log_probability[groups].sum(-1).exp() / group_size
    total = logits.sum() * 0
    for field, gradient in ((current.logprobs, leaf.logprobs.grad), (current.kl, leaf.kl.grad)):
        if gradient is not None:
            assert not gradient[~mask].any()
            total = (
                total + (probability.repeat_interleave(group_size)[:, None] * gradient * field[rows]).sum()
            )
    (result,) = torch.autograd.grad(total, logits)
    return result
