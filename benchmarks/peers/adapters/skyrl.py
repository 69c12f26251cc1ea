"""SkyRL: a KL in the loss, its default, and in the reward."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from ..hooks import load_hook
from ..importing import field_default, load
from ..setting import HOOK, Setting

DISTRIBUTION = "skyrl"


def _in_loss(utils: Any, masked_mean: Any, kind: str, coefficient: float) -> Any:
    def loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        kl = utils.compute_approx_kl(logprobs, ref_logprobs, loss_mask=mask, kl_estimator_type=kind)
        return coefficient * masked_mean(kl, mask, dim=-1).mean()

    return loss


def _in_reward(
    utils: Any,
    trainer: Any,
    config: Any,
    kind: str,
    coefficient: float,
    names: tuple[str, str] = ("rloo", "regular"),
) -> Any:
    """The trainer's penalty of rewards of 0, advantages, their reduction, and a policy loss, by name."""
    algorithm = SimpleNamespace(kl_estimator_type=kind, kl_loss_coef=coefficient)
    penalised = SimpleNamespace(
        cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm)),
        reward_kl_controller=None,
        all_metrics={},
    )

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        data = _Data(loss_mask=mask, rewards=0 * ref_logprobs, base_action_log_probs=ref_logprobs)
        data |= {"action_log_probs": old_logprobs}
        rewards = trainer.apply_reward_kl_penalty(penalised, data)["rewards"]
        advantages, _ = utils.AdvantageEstimatorRegistry.get(names[0])(
            token_level_rewards=rewards, response_mask=mask, index=np.zeros(len(mask), dtype=int)
        )
        advantages = utils.apply_loss_reduction_to_advantages_minibatch(
            advantages, mask, "token_mean", len(mask), mask.shape[1]
        )
        return utils.PolicyLossRegistry.get(names[1])(logprobs, old_logprobs, advantages, config, mask)[0]

    return loss


class _Data(dict[str, Any]):
    metadata: dict[str, Any] = {}  # noqa: RUF012


def settings() -> Iterator[Setting]:
    """The losses of SkyRL."""
    trainer = load("skyrl.train.trainer").RayPPOTrainer
    utils = load("skyrl.backends.skyrl_train.utils.ppo_utils")
    config = load("skyrl.train.config").AlgorithmConfig
    masked_mean = load("skyrl.backends.skyrl_train.utils.torch_utils").masked_mean
    coefficient = field_default(config, "kl_loss_coef")
    defaults = {"kl_estimator_type": field_default(config, "kl_estimator_type")}
    for kind in ("k3", "k2", "k1", "abs"):
        function = _in_loss(utils, masked_mean, kind, coefficient)
        yield Setting("use_kl_loss", {"kl_estimator_type": kind}, defaults, "KL loss", function)
    for kind in ("k1", "k3"):
        function = _in_reward(utils, trainer, config(), kind, coefficient)
        options = {"kl_estimator_type": kind}
        yield Setting("use_kl_in_reward, RLOO", options, defaults, "KL penalty in the reward", function)
    load_hook("skyrl_klrb")
    function = _in_reward(utils, trainer, config(), "k1", coefficient, ("to_go", "prefix"))
    options = {"advantage_estimator": "to_go", "policy_loss_type": "prefix"}
    yield Setting("use_kl_in_reward", options, {}, HOOK, function)
