"""Gradients of reward, KL and objective, and their noise, as defined for both the study and the monitor.

The gradient of the objective is that of the estimator's loss. The gradient of the reward is that of `NoKL`
for all estimators: another estimator at beta 0 may fit coefficients, which then act as a baseline of the
reward. The gradient of the KL is the difference of the two.
"""

import torch
from torch import Tensor, nn

from lit_klrb.estimators import KLEstimator, LossWeights, NoKL
from lit_klrb.functional import TokenStats

TERMS = ("reward", "kl", "total")
# The estimator whose gradient is that of the reward alone.
REWARD_ALONE = NoKL()


def policy_gradient(
    policy: nn.Module,
    beta: float,
    estimator: KLEstimator,
    stats: TokenStats,
    mask: Tensor,
    weights: LossWeights,
) -> Tensor:
    """Gradient of an estimator's loss with respect to the trained parameters, shape [parameters].

    Args:
        policy: The policy.
        beta: Weight of the KL.
        estimator: The estimator.
        stats: Statistics of B sequences under the policy, differentiable; their graph is retained.
        mask: True on completion tokens, shape [B, T].
        weights: The estimator's weights for these sequences.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    loss = estimator.loss(stats, mask, weights, beta=beta)
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return torch.nn.utils.parameters_to_vector(gradients)


def noise_and_signal(sums: Tensor, squares: Tensor, count: int) -> dict[str, float]:
    """Noise and signal-to-noise ratio of each term, and the KL's share of the noise.

    A step uses the mean of `count` independent gradients g. Its noise is the trace of its covariance,
    tr Cov(g) / count; its signal is the squared norm of its expectation, estimated without bias.

    Args:
        sums: Sums of the gradients of reward, KL and objective, shape [3, parameters].
        squares: Sums of their squared norms, shape [3].
        count: Number of gradients, such as one per prompt.

    Returns:
        `noise_*` and `snr_*` for each of `TERMS`, and `kl_share`, the KL's share of noise_reward + noise_kl.

    Example:
        >>> gradients = torch.tensor([[3.0, 1.0], [1.0, 1.0]])      # two prompts, the same for all terms
        >>> values = noise_and_signal(gradients.sum(0).expand(3, 2), gradients.square().sum().expand(3), 2)
        >>> values["noise_total"], values["snr_total"], values["kl_share"]
        (1.0, 4.0, 0.5)
    """
    mean_squares = (sums / count).square().sum(1).cpu()
    noise = (squares.cpu() / count - mean_squares) / (count - 1)
    snr = (mean_squares - noise) / noise  # the squared norm of a mean exceeds the signal by the noise
    values = {f"noise_{term}": value.item() for term, value in zip(TERMS, noise, strict=True)}
    values |= {f"snr_{term}": value.item() for term, value in zip(TERMS, snr, strict=True)}
    return values | {"kl_share": (noise[1] / (noise[0] + noise[1])).item()}
