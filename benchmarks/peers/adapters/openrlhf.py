"""OpenRLHF: the KL in the reward, its default, and in the loss."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..importing import argument_defaults, bare, load
from ..setting import Setting

DISTRIBUTION = "openrlhf"
COEFFICIENT = 0.01


def _in_loss(utils: Any, loss: Any, estimator: str, unbiased: bool) -> Any:
    def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        kl = utils.compute_approx_kl(logprobs, ref_logprobs, old_logprobs, estimator, unbiased)
        return COEFFICIENT * loss.aggregate_loss(kl, mask)

    return kl_loss


def _in_reward(utils: Any, loss: Any, maker: Any, estimator: str) -> Any:
    """Rewards of 0 with the KL, their returns, and the policy's loss."""

    def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        kl = utils.compute_approx_kl(old_logprobs, ref_logprobs, kl_estimator=estimator) * mask
        reward = utils.compute_reward(logprobs.new_zeros(len(mask)), COEFFICIENT, kl, action_mask=mask)
        returns = maker.get_cumulative_returns(reward, mask, 1.0)
        return loss.PolicyLoss()(logprobs, old_logprobs, returns, action_mask=mask)[0]

    return kl_loss


def settings() -> Iterator[Setting]:
    """The losses of OpenRLHF."""
    utils, loss = load("openrlhf.models.utils"), load("openrlhf.models.loss")
    maker = bare(load("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker)
    prefix = "algo.kl."
    defaults = argument_defaults(Path(utils.__file__).parents[1] / "cli" / "train_ppo_ray.py")
    defaults = {key: defaults[prefix + key] for key in ("use_loss", "estimator", "unbiased_gradient")}
    for estimator in ("k1", "k2", "k3"):
        options = defaults | {"use_loss": False, "estimator": estimator}
        function = _in_reward(utils, loss, maker, estimator)
        yield Setting("--algo.kl", options, defaults, "KL penalty in PPO", function)
        for unbiased in (False, True):
            options = {"use_loss": True, "estimator": estimator, "unbiased_gradient": unbiased}
            called = "the true reverse-KL gradient" if unbiased else "KL loss from GRPO"
            yield Setting("--algo.kl", options, defaults, called, _in_loss(utils, loss, estimator, unbiased))
