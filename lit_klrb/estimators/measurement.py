"""The expected value and gradient of an estimator, computed by enumerating small models."""

import operator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.estimators.base import KLEstimator
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
