"""Inputs that would be broadcast to another gradient are refused by every estimator, of the user's too."""

import math

import pytest
import torch

from lit_klrb import estimators
from lit_klrb.cli.explain import estimator_classes
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, LossWeights
from lit_klrb.functional.logprobs import token_stats

CLASSES = estimator_classes().values()


class Mine(estimators.KLEstimator):
    """What a user writes, without a check."""

    def value(self, stats, mask):
        return (stats.logprobs - stats.ref_logprobs).sum(-1)

    def weights(self, stats, mask, rewards=None, *, beta=1.0, group_size=1):
        return LossWeights(-self.centred(rewards, group_size)[:, None] * mask, mask.double())

    def loss(self, stats, mask, weights, *, beta=1.0, behaviour_logprobs=None):
        return (weights.score * stats.logprobs).sum()


@pytest.fixture
def rollout():
    logits = torch.randn(2, 4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(1))
    return token_stats(*logits, tokens), torch.ones(4, 3, dtype=torch.bool), tokens


@pytest.mark.parametrize("kind", [*CLASSES, Mine])
def test_no_public_method_takes_another_shape_or_beta(kind, rollout):
    estimator, (stats, mask, tokens) = kind(), rollout
    rewards = torch.arange(4.0)
    settings = {"beta": 0.1, "group_size": 2}
    fine = LossWeights(torch.ones(4, 3), torch.ones(4, 3))

    def refused(match, method, *args, **changes):
        with pytest.raises(ConfigurationError, match=match):
            method(*args, **changes)

    remember = EstimatorMemory(estimator)
    column = r"^rewards: must have shape \[4\], got \[4, 1\]; pass rewards.squeeze\(-1\)$"
    refused(column, estimator.objective, stats, mask, rewards[:, None], **settings)
    refused(column, estimator.weights, stats, mask, rewards[:, None], **settings)
    refused(column, estimator.weights, stats, mask, rewards=rewards[:, None], **settings)
    refused(column, remember.weights, stats, mask, rewards[:, None], **settings, tokens=tokens)
    refused(column, remember.observe, tokens, mask, rewards[:, None], stats, group_size=2)
    refused(r"^rewards: .*got \[3\]$", estimator.weights, stats, mask, rewards[:3], **settings)
    for beta in (math.nan, math.inf, -1.0):
        settings["beta"], match = beta, f"^beta: must be at least 0 and finite, got {beta}"
        refused(match, estimator.objective, stats, mask, rewards, **settings)
        refused(match, estimator.weights, stats, mask, rewards, **settings)
        refused(match, estimator.loss, stats, mask, fine, beta=beta)
        refused(match, remember.weights, stats, mask, rewards, **settings, tokens=tokens)
    for method in (estimator.surrogate, estimator.value, estimator.weights):
        refused(r"^mask: must be torch.bool of shape \[B, T\], got torch.int64", method, stats, mask.long())
        refused(r"^stats\..*: must have shape \[4, 1\], got \[4, 3\]", method, stats, mask[:, :1])
    narrow = torch.ones(4, 1)
    refused(r"^score: must have .*\[4, 1\]", estimator.loss, stats, mask, LossWeights(narrow, narrow))
    refused(r"^behaviour_logprobs: ", estimator.loss, stats, mask, fine, behaviour_logprobs=narrow)
