"""Expected gradients of estimators, by enumeration of every group of completions of small models."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_klrb.estimators import KLEstimator, LossWeights
from lit_klrb.estimators.cross_fit import FitSums
from lit_klrb.estimators.fitted import FittedEstimator
from lit_klrb.functional import TokenStats, TopK, token_stats
from lit_klrb.functional.enumeration import TabularLM, exact_kl_gradient, exact_objective


class Variation(NamedTuple):
    """A variation that must not change the gradient.

    Args:
        parts: "one step": `surrogate` or `objective`; "whole": `weights`, then `loss`; "uneven": `weights`,
            then the losses of one row, of the rest of the first half, and of the second half.
        junk: Content of the padding.
    """

    parts: Literal["one step", "whole", "uneven"]
    junk: float

    def slices(self, size: int) -> list[slice]:
        cuts = (0, 1, size // 2, size) if self.parts == "uneven" else (0, size)
        return list(map(slice, cuts, cuts[1:]))


class Draws(NamedTuple):
    """All groups of completions as one batch, and the probability of each row's group divided by its size."""

    rows: Tensor
    mask: Tensor
    current: TokenStats
    generated: TokenStats
    on_policy: Tensor
    behind: Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """A policy p, the reference q, the policy p_old that generated, a reward for each completion, a value for
    each token."""

    policy: TabularLM
    reference: TabularLM
    behaviour: TabularLM
    rewards: Tensor
    token_values: Tensor | None = None

    @classmethod
    def random(cls, contexts: int, vocab_size: int, max_length: int, seed: int) -> "Case":
        generator = torch.Generator().manual_seed(seed)

        def table(scale: float) -> Tensor:
            return scale * torch.randn(contexts, vocab_size, dtype=torch.float64, generator=generator)

        old, reference = table(1.0), table(1.0)
        policy, behaviour, ref = (TabularLM(t, max_length) for t in (old + table(0.3), old, reference))
        rewards = torch.randn(len(policy.sequences()[0]), dtype=torch.float64, generator=generator)
        token_values = torch.randn(vocab_size, dtype=torch.float64, generator=generator)
        return cls(policy, ref, behaviour, rewards, token_values)

    @cached_property
    def sequences(self) -> tuple[Tensor, Tensor]:
        return self.policy.sequences()

    def stats(self, logits: Tensor, topk: TopK | None = None, jsd: float | None = None) -> TokenStats:
        tokens, _ = self.sequences
        policy = TabularLM(logits, self.policy.max_length)
        logits = [model.token_logits(tokens) for model in (policy, self.reference)]
        stats = token_stats(*logits, tokens, token_values=self.token_values, topk=topk, jsd_weight=jsd)
        # An arbitrary number for each prefix
        places = (self.policy.logits.shape[1] + 1) ** torch.arange(tokens.shape[1])
        codes = ((tokens + 1) * places).cumsum(1) - (tokens + 1) * places
        before = torch.sin(7.0 * codes).double()
        return stats._replace(reward_to_come=self.rewards[:, None] - before)

    @cache  # noqa: B019 (cases live as long as the tests)
    def current(self, topk: TopK | None = None, jsd: float | None = None) -> tuple[Tensor, TokenStats]:
        """The policy's logits as a leaf, and the differentiable statistics of each completion."""
        leaf = self.policy.logits.clone().requires_grad_()
        return leaf, self.stats(leaf, topk, jsd)

    def groups(self, size: int) -> Tensor:
        """Every group of `size` completions, as indices of completions, shape [groups, size]."""
        completions = torch.arange(len(self.sequences[0]))
        return torch.cartesian_prod(*[completions] * size).view(-1, size)

    @cache  # noqa: B019 (cases live as long as the tests)
    def draws(self, size: int, junk: float, topk: TopK | None = None, jsd: float | None = None) -> Draws:
        groups = self.groups(size)
        rows = groups.flatten()
        mask = self.sequences[1][rows]
        current = self.current(topk, jsd)[1].detach()
        generated = self.stats(self.behaviour.logits, topk, jsd)
        batches = (
            stats.map(lambda field: torch.where(mask, field[rows], junk)) for stats in (current, generated)
        )
        chances = (
            (torch.where(self.sequences[1], stats.logprobs, 0).sum(-1)[groups].sum(-1).exp() / size)
            .repeat_interleave(size)
            .unsqueeze(-1)
            for stats in (current, generated)
        )
        return Draws(rows, mask, *batches, *chances)


def expected_gradient(
    case: Case,
    estimator: KLEstimator,
    group_size: int,
    *,
    off_policy: bool,
    beta: float | None,
    variation: Variation,
) -> Tensor:
    """The exact expectation of the estimator's gradient in the policy's logits, [contexts, V].

    All groups form one batch; each row's gradient in the statistics is weighted by the probability of its
    group before it is carried on to the logits.

    Args:
        case: Models and rewards.
        estimator: The estimator under test.
        group_size: Completions per group.
        off_policy: Draw from `case.behaviour` rather than from the policy.
        beta: Weight of the KL beside the rewards; None for the surrogate of the KL alone.
        variation: A variation that must not change the result.
    """
    estimator = replace(estimator, allow_biased=True)
    sums = estimator.topk, estimator.reads_jsd
    draws = case.draws(group_size, variation.junk, *sums)
    leaf = draws.current.map(lambda field: field.detach().requires_grad_())
    rewards = None if beta is None else case.rewards[draws.rows]
    behaviour = draws.generated.logprobs if off_policy else None
    if variation.parts != "one step":
        rollout = draws.generated if off_policy else draws.current
        scale = 1.0 if beta is None else beta
        weights = estimator.weights(rollout, draws.mask, rewards, beta=scale, group_size=group_size)
        parts = variation.slices(len(draws.rows))
        loss = loss_in_parts(estimator, leaf, draws.mask, weights, scale, behaviour, parts)
    elif rewards is None:
        loss = estimator.surrogate(leaf, draws.mask, group_size=group_size, behaviour_logprobs=behaviour)
    else:
        loss = estimator.objective(
            leaf, draws.mask, rewards, beta=beta, group_size=group_size, behaviour_logprobs=behaviour
        )
    chance = draws.behind if off_policy else draws.on_policy
    return carried_to_logits(case, draws, leaf, chance, loss * len(draws.rows), *sums)


def loss_in_parts(
    estimator: KLEstimator,
    stats: TokenStats,
    mask: Tensor,
    weights: LossWeights,
    beta: float,
    behaviour: Tensor | None,
    parts: list[slice],
) -> Tensor:
    losses = [
        estimator.loss(
            stats.map(lambda field, part=part: field[part]),
            mask[part],
            weights.map(lambda field, part=part: field[part]),
            beta=beta,
            behaviour_logprobs=None if behaviour is None else behaviour[part],
        )
        for part in parts
    ]
    shares = [(part.stop - part.start) / len(mask) for part in parts]
    return torch.stack(losses) @ torch.tensor(shares, dtype=torch.float64)


def carried_to_logits(
    case: Case,
    draws: Draws,
    leaf: TokenStats,
    chance: Tensor,
    total: Tensor,
    topk: TopK | None = None,
    jsd: float | None = None,
) -> Tensor:
    """The gradient in the logits, from each row's gradient in its statistics times its probability."""
    logits, current = case.current(topk, jsd)
    names = [
        "logprobs",
        "kl",
        "forward_kl",
        "expected_value",
        *((("head_kl", "head_mass", "head_forward_kl")) if topk else ()),
    ]
    names += [] if jsd is None else ["jsd"]
    leaves, outputs = ([getattr(stats, name) for name in names] for stats in (leaf, current))
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    per_completion = []
    for gradient in gradients:
        assert not gradient[~draws.mask].any()
        zeros = torch.zeros_like(current.logprobs)
        per_completion.append(zeros.index_add(0, draws.rows, chance * gradient))
    (result,) = torch.autograd.grad(outputs, logits, per_completion, retain_graph=True)
    return result


def rows_of(stats: TokenStats, rows: Tensor) -> TokenStats:
    return stats.map(lambda field: field[rows])


def distinct_batches(case: Case, groups: int, group_size: int) -> tuple[Tensor, Tensor]:
    """All batches up to the order of groups and of their completions, and the number of such orders."""
    ordered = case.groups(groups * group_size).view(-1, groups, group_size).sort(-1).values
    codes = (ordered * len(case.sequences[0]) ** torch.arange(group_size)).sum(-1)
    batches = ordered.gather(1, codes.argsort(-1)[..., None].expand_as(ordered)).flatten(1)
    return batches.unique(dim=0, return_counts=True)


def expected_batch_gradient(
    case: Case,
    estimator: FittedEstimator,
    groups: int,
    group_size: int,
    *,
    beta: float | None = None,
    off_policy: bool = False,
    earlier: FitSums | None = None,
) -> tuple[Tensor, LossWeights]:
    """Expectation over all batches of `groups` groups, as coefficients depend on all groups of a batch."""
    mask = case.sequences[1]
    logits = case.policy.logits.clone().requires_grad_()
    current, generated = case.stats(logits), case.stats(case.behaviour.logits)
    rollout = generated if off_policy else current
    logprob = torch.where(mask, rollout.logprobs, 0).sum(-1).detach()
    batches, counts = distinct_batches(case, groups, group_size)
    by_batch = [
        estimator.fitted_weights(
            earlier,
            rows_of(rollout.detach(), batch),
            mask[batch],
            None if beta is None else case.rewards[batch],
            beta=beta or 1.0,
            group_size=group_size,
        )[0]
        for batch in batches
    ]
    weights = LossWeights(*map(torch.cat, zip(*by_batch, strict=True)))
    rows = batches.flatten()
    leaf = current.map(lambda field: field[rows].detach().requires_grad_())
    estimator.loss(
        leaf,
        mask[rows],
        weights,
        beta=beta or 1.0,
        behaviour_logprobs=generated.logprobs[rows].detach() if off_policy else None,
    ).backward()
    chances = counts * logprob[batches].sum(-1).exp()
    assert abs(chances.sum().item() - 1) < 1e-9
    scale = (chances * len(batches)).repeat_interleave(groups * group_size)[:, None]
    total = sum(
        (scale * getattr(leaf, name).grad * getattr(current, name)[rows]).sum()
        for name in ("logprobs", "kl", "expected_value")
        if getattr(leaf, name).grad is not None
    )
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient, weights


def exact_gradient(case: Case, beta: float | None) -> Tensor:
    """Gradient of the KL or, with beta, of minus the objective."""
    if beta is None:
        return exact_kl_gradient(case.policy, case.reference)
    leaf = case.policy.logits.clone().requires_grad_()
    value = exact_objective(TabularLM(leaf, case.policy.max_length), case.reference, case.rewards, beta)
    return -torch.autograd.grad(value, leaf)[0]
