"""The expected value and gradient of an estimator, computed by enumerating small models."""

import operator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.estimators.base import KLEstimator
from lit_klrb.estimators.unbiased import MonteCarlo, RaoBlackwell
from lit_klrb.functional.enumeration import TabularLM, exact_kl, exact_kl_gradient
from lit_klrb.functional.logprobs import token_stats

KL_LEVELS = (0.01, 0.3, 3.0)
# Of the four tokens of the measured models, for estimators that read only the most likely ones.
TOP_K = 1


class Measurement(NamedTuple):
    """Expected value and gradient of an estimator at a given KL.

    Args:
        kl: The exact KL(policy || reference), in nats per sequence.
        mean_value: The expectation of the estimator's value, in nats per sequence.
        cosine: Cosine between the expected and the true gradient; None if the expected gradient is zero.
        norm_ratio: Norm of the expected gradient divided by that of the true gradient.
    """

    kl: float
    mean_value: float
    cosine: float | None
    norm_ratio: float


def measure(estimator: KLEstimator) -> list[Measurement]:
    """Expected value and gradient of single completions without a baseline, at `KL_LEVELS`.

    The models are Markov chains over three tokens and EOS, with completions of at most four tokens. Prefixes
    share parameters, and early tokens influence later KLs.
    """
    generator = torch.Generator().manual_seed(0)
    table, direction = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    reference = TabularLM(table, max_length=4)
    policies = (policy_at_kl(reference, direction, kl) for kl in KL_LEVELS)
    return [_measure_at(replace(estimator, baseline=None), policy, reference) for policy in policies]


def policy_at_kl(reference: TabularLM, direction: Tensor, kl: float) -> TabularLM:
    """The policy with the given KL to the reference, along a direction of logits, found by bisection."""
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        policy = TabularLM(reference.logits + middle * direction, reference.max_length)
        low, high = (middle, high) if exact_kl(policy, reference) < kl else (low, middle)
    return policy


def _measure_at(estimator: KLEstimator, policy: TabularLM, reference: TabularLM) -> Measurement:
    leaf = policy.logits.clone().requires_grad_()
    tokens, mask = policy.sequences()
    logits = TabularLM(leaf, policy.max_length).token_logits(tokens)
    topk = estimator.topk and estimator.topk._replace(k=TOP_K)
    stats = token_stats(logits, reference.token_logits(tokens), tokens, topk=topk)
    probabilities = policy.logprobs(tokens, mask).exp()
    total = torch.zeros_like(probabilities[0])
    for n, probability in enumerate(probabilities):
        row = slice(n, n + 1)  # a rollout of one completion
        row_stats = stats.map(operator.itemgetter(row))
        weights = estimator.weights(row_stats.detach(), mask[row])
        total = total + probability * estimator.loss(row_stats, mask[row], weights)
    (expected,) = torch.autograd.grad(total, leaf, materialize_grads=True)

    true = exact_kl_gradient(policy, reference)
    ratio = (expected.norm() / true.norm()).item()
    vanishes = ratio < 1e-9
    return Measurement(
        kl=exact_kl(policy, reference).item(),
        mean_value=(probabilities @ estimator.value(stats.detach(), mask)).item(),
        cosine=None if vanishes else (expected * true).sum().item() / (expected.norm() * true.norm()).item(),
        norm_ratio=0.0 if vanishes else ratio,
    )


class Counterexample(NamedTuple):
    """Two models for which Rao-Blackwellisation increases the variance of the KL of a sequence.

    Args:
        sequences: The completions.
        probabilities: Their probabilities under the policy.
        monte_carlo: The value of `MonteCarlo` for each completion.
        rao_blackwell: The value of `RaoBlackwell` for each completion.
        variances: The variances of the two values, in this order.
    """

    sequences: list[str]
    probabilities: list[float]
    monte_carlo: list[float]
    rao_blackwell: list[float]
    variances: tuple[float, float]


def counterexample() -> Counterexample:
    """A model over tokens a (EOS) and b, where the log ratio of the first token offsets later KLs.

    p(a) = p(b) = 1/2 and q(a) = 0.3, q(b) = 0.7; after b the policy is certain of a second b, to which the
    reference gives 3/7. The log ratio is log(5/3) for both sequences.
    """
    rows = torch.tensor([[[0.5, 0.5], [0.0, 1.0]], [[0.3, 0.7], [4 / 7, 3 / 7]]], dtype=torch.float64)
    policy, reference = (TabularLM(table.log(), max_length=2) for table in rows)
    tokens, mask = policy.sequences()
    stats = token_stats(policy.token_logits(tokens), reference.token_logits(tokens), tokens)
    probabilities = policy.logprobs(tokens, mask).exp()
    produced = probabilities > 0
    values = [kind().value(stats, mask)[produced] for kind in (MonteCarlo, RaoBlackwell)]
    probabilities = probabilities[produced]
    variances = [probabilities @ (value - probabilities @ value) ** 2 for value in values]
    return Counterexample(
        sequences=[
            "".join("ab"[token] for token in row[keep])
            for row, keep in zip(tokens[produced], mask[produced], strict=True)
        ],
        probabilities=probabilities.tolist(),
        monte_carlo=values[0].tolist(),
        rao_blackwell=values[1].tolist(),
        variances=(variances[0].item(), variances[1].item()),
    )
