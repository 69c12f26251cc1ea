"""What an estimator gives a training step, checked: it may be the user's own."""

import inspect
from typing import Any

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators.base import KLEstimator
from lit_klrb.estimators.shapes import LossWeights
from lit_klrb.functional.logprobs import TokenStats

KEY = "kl.estimator"


def checked_weights(estimator: KLEstimator, *args: Any, **kwargs: Any) -> LossWeights:
    """The estimator's weights of a rollout; arguments are those of `KLEstimator.weights`.

    Raises:
        ConfigurationError: If it takes other arguments, or gives anything but `LossWeights` of the mask's
            shape [B, T]. Weights that are not finite are no mistake here: a run that diverges has them.
    """
    name = f"{type(estimator).__name__}.weights"
    try:
        inspect.signature(estimator.weights).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigurationError(f"{name} must take the arguments of KLEstimator: {error}", key=KEY) from None
    weights: Any = estimator.weights(*args, **kwargs)
    if not isinstance(weights, LossWeights):
        raise ConfigurationError(f"{name} must return LossWeights, got {type(weights).__name__}", key=KEY)
    shape = args[1].shape
    for field, value in weights._asdict().items():
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.shape != shape:
            got = f"shape {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigurationError(f"{name}: {field} must have the shape {[*shape]}, got {got}", key=KEY)
    return weights


def checked_loss(estimator: KLEstimator, *args: Any, **kwargs: Any) -> Tensor:
    """The estimator's loss; arguments are those of `KLEstimator.loss`."""
    name = f"{type(estimator).__name__}.loss"
    loss: Any = estimator.loss(*args, **kwargs)
    if not isinstance(loss, Tensor) or loss.shape:
        got = f"shape {[*loss.shape]}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigurationError(f"{name} must return a tensor without dimensions, got {got}", key=KEY)
    if not loss.requires_grad:
        raise ConfigurationError(f"{name} returned a loss that has no gradient", key=KEY)
    return loss


def check_served(estimator: KLEstimator) -> None:
    """Check that an estimator works from log-probabilities of sampled tokens and of a teacher's own head."""
    if estimator.topk is not None and estimator.topk.support == "policy":
        problem = "policy needs the teacher's log-probabilities of the student's k most likely tokens, which"
        raise ConfigurationError(f"{problem} no server scores; use reference", key=f"{KEY}.support")
    nothing, mask = torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool)
    stats = TokenStats(*[nothing] * 2, *[None] * 4, *[nothing] * 4)._replace(head_forward_kl=nothing)
    try:
        weights = estimator.weights(stats, mask, group_size=2)
        estimator.loss(stats, mask, weights, behaviour_logprobs=nothing)
    except ConfigurationError:
        sends = "a served teacher sends, which are its k most likely tokens and the sampled one"
        remedy = "use RaoBlackwellTopK with support: reference, or MonteCarloRewardToGo"
        problem = f"{type(estimator).__name__} needs more than {sends}; {remedy}"
        raise ConfigurationError(problem, key=KEY) from None
