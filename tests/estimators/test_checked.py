"""Custom estimators are checked in the training step."""

from types import SimpleNamespace

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import K3Loss, LossWeights
from lit_klrb.estimators.checked import checked_loss, checked_weights
from lit_klrb.functional import token_stats

MASK = torch.ones(4, 3, dtype=torch.bool)
ONES = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "weights must return LossWeights, got NoneType"),
        ((ONES, ONES), "weights must return LossWeights, got tuple"),
        (LossWeights(ONES[:1], ONES), r"score must have the shape \[4, 3\], got shape \[1, 3\]"),
        (LossWeights(ONES, [1.0]), r"kl must have the shape \[4, 3\], got list"),
        (LossWeights(ONES, ONES, ONES[:, :1]), r"value must have the shape \[4, 3\], got shape \[4, 1\]"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    mine = SimpleNamespace(weights=lambda stats, mask: weights)
    with pytest.raises(ConfigurationError, match=rf"^kl\.estimator: SimpleNamespace\..*{message}"):
        checked_weights(mine, None, MASK)


def test_weights_with_wrong_arguments_are_refused():
    mine = SimpleNamespace(weights=lambda stats: LossWeights(ONES, ONES))
    with pytest.raises(ConfigurationError, match="weights must take the arguments of KLEstimator: too many"):
        checked_weights(mine, None, MASK)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "must return a tensor without dimensions, got NoneType"),
        (ONES.sum(1), r"must return a tensor without dimensions, got shape \[4\]"),
        (ONES.sum(), "has no gradient"),
    ],
)
def test_an_invalid_loss_is_refused(loss, message):
    with pytest.raises(ConfigurationError, match=message):
        checked_loss(SimpleNamespace(loss=lambda: loss))


def test_a_valid_estimator_passes():
    weights, loss = LossWeights(ONES, ONES), ONES.clone().requires_grad_().sum()
    assert checked_weights(SimpleNamespace(weights=lambda stats, mask: weights), None, MASK) is weights
    diverged = LossWeights(ONES * torch.nan, ONES)
    assert checked_weights(SimpleNamespace(weights=lambda stats, mask: diverged), None, MASK) is diverged
    assert checked_loss(SimpleNamespace(loss=lambda: loss)) is loss


@pytest.mark.parametrize(
    "loss",
    [
        lambda *inputs: K3Loss().surrogate(*inputs, group_size=2),
        lambda *inputs: K3Loss().objective(*inputs, torch.ones(4), beta=0.1, group_size=2),
    ],
)
def test_a_biased_loss_warns_of_the_line_that_asked_for_it(loss):
    logits = torch.zeros(4, 3, 2, requires_grad=True)
    stats = token_stats(logits, torch.zeros(4, 3, 2), torch.zeros(4, 3, dtype=torch.long))
    with pytest.warns(UserWarning, match="K3Loss has a biased gradient") as shown:
        loss(stats, MASK)
    assert [warning.filename for warning in shown] == [__file__]
