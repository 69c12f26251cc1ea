"""KL losses of other software, and the estimator whose gradient each one has.

They differ in name and value, but there are only four gradients: the sampled token's log ratio r_t times
grad log p(y_t), with or without that token's importance ratio; that of k3; and that of k1. All of them are
own-token gradients, which omit the effect of tokens on later KLs.

OpenRLHF is read at commit d3d1920 (pull request 1309; openrlhf/models/utils.py), NeMo-RL at commit 7ea279a
(nemo_rl/algorithms/loss/loss_functions.py), both of August 2026;
replication/evidence/released_losses.md has more.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from lit_klrb.estimators.base import KLEstimator, OffPolicy
from lit_klrb.estimators.biased import K1Loss, K2Loss, K3Loss
from lit_klrb.functional.kl import kl_k1_per_token, kl_k2_per_token, kl_k3_per_token


class NameInUse(NamedTuple):
    """A KL loss of other software.

    Args:
        name: What it is called there.
        used_by: The software.
        loss: Its loss per token from log-probabilities under the policy, the reference and the behaviour
            policy, shape [B, T] each. Clamps at large log ratios are omitted.
        estimator: The estimator with the same gradient, sample by sample.
        off_policy: That estimator's correction for completions of an earlier policy.
    """

    name: str
    used_by: str
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    estimator: type[KLEstimator]
    off_policy: OffPolicy

    @property
    def equals(self) -> str:
        """The estimator, with its correction if there is one.

        Example:
            >>> {entry.name: entry.equals for entry in NAMES_IN_USE}["k3+"]
            'K2Loss'
        """
        setting = "" if self.off_policy == "none" else f"(off_policy={self.off_policy!r})"
        return self.estimator.__name__ + setting


def _k1(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return kl_k1_per_token(p, q)


def _k3(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return kl_k3_per_token(p, q)


def _k2_weighted(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return (p - old).exp().detach() * kl_k2_per_token(p, q)


def _value_of_k1(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return _straight_through(kl_k1_per_token(p, q), kl_k2_per_token(p, q))


def _value_of_k3(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return _straight_through(kl_k3_per_token(p, q), kl_k2_per_token(p, q))


def _value_of_k3_weighted(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return _straight_through(kl_k3_per_token(p, q), _k2_weighted(p, q, old))


def _ratio_k3(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return (p - old).exp() * kl_k3_per_token(p, q)


def _k3_plus_plus(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return (p - p.detach()).exp() * kl_k3_per_token(p, q)


def _k4(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return (p - p.detach()).exp() * (p - q).detach()


def _k5(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return (q - p).detach().exp() * (q - p) + p - p.detach()


def _advantage(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
    return (p - old).exp() * (p - q).detach()


def _straight_through(value: Tensor, differentiated: Tensor) -> Tensor:
    """The value of one tensor with the gradient of another."""
    return value.detach() + differentiated - differentiated.detach()


NAMES_IN_USE = (
    NameInUse("k1 in the loss", "implementations that differentiate k1", _k1, K1Loss, "none"),
    NameInUse("k1+", "verl", _value_of_k1, K2Loss, "none"),
    NameInUse("k3+", "verl", _value_of_k3, K2Loss, "none"),
    NameInUse("K3++", "EMA-PG (arXiv:2602.04417), NeMo-RL", _k3_plus_plus, K2Loss, "none"),
    NameInUse("K4", "EMA-PG", _k4, K2Loss, "none"),
    NameInUse("k2 times the token's ratio", "studies of GRPO's penalty", _k2_weighted, K2Loss, "token"),
    NameInUse("unbiased_gradient", "OpenRLHF", _value_of_k3_weighted, K2Loss, "token"),
    NameInUse(
        "ratio times k3 (unbiased KL)",
        "newer TRL GRPO, NeMo-RL (use_on_policy_kl_approximation), slime, Unsloth, Liger, DeepSeek-V3.2",
        _ratio_k3,
        K2Loss,
        "token",
    ),
    NameInUse("own token's k1 as advantage", "Tinker, on-policy distillation", _advantage, K2Loss, "token"),
    NameInUse("k3 in the loss", "GRPO in verl, OpenRLHF, SkyRL, torchtune, older TRL", _k3, K3Loss, "none"),
    NameInUse("K5", "EMA-PG", _k5, K3Loss, "none"),
)
