"""The code of the RLHF book: a KL in the loss and in the reward, and self-distillation."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..importing import field_default, load
from ..setting import Setting

REPOSITORY = "natolambert/rlhf-book"
FOLDERS = ("code",)
PATHS = ("code",)
BETA = 0.01


def _in_loss(module: Any, estimator: str) -> Any:
    grpo = module.GRPOLoss(clip_eps_lo=0.2, clip_eps_hi=0.2, beta=BETA, kl_estimator=estimator)

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        zeros = torch.zeros_like(ref_logprobs)
        experience = SimpleNamespace(
            log_probs_old=old_logprobs, log_probs_ref=ref_logprobs, action_mask=mask, advantages=zeros
        )
        return grpo(logprobs, experience)

    return loss


def _in_reward(module: Any, utils: Any, estimator: str) -> Any:
    """Rewards of 0 with the KL, as the advantages of REINFORCE."""
    config = SimpleNamespace(beta=BETA, loss="reinforce", kl_estimator=estimator)

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        rewards = {"total": torch.zeros_like(ref_logprobs[:, :1])}
        advantages = utils.apply_reward_kl(rewards, old_logprobs, ref_logprobs, mask, config)["total"]
        experience = SimpleNamespace(action_mask=mask, advantages=advantages)
        return module.ReinforceLoss()(logprobs, experience)

    return loss


def _distillation(module: Any) -> Any:
    """The chunk of student and teacher, whose last position predicts nothing."""
    whole = module.SDPOLoss(kl_top_k=3)

    def loss(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
        def model(input_ids: Tensor, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.nn.functional.pad(input_ids, (0, 0, 0, 1)))

        batch = {"s_ids": logits, "t_ids": ref_logits, "s_mask": mask, "t_mask": mask, "action_mask": mask}
        return whole._chunk_loss(model, batch, slice(None), mask.shape[1], mask.sum())

    return loss


def settings() -> Iterator[Setting]:
    """The losses of the book's code."""
    module, utils = load("policy_gradients.loss"), load("policy_gradients.utils")
    defaults = {"kl_estimator": field_default(load("policy_gradients.config").Config, "kl_estimator")}
    for estimator in ("kl1", "kl2", "kl3"):
        options = {"kl_estimator": estimator}
        yield Setting("GRPOLoss", options, defaults, "KL penalty", _in_loss(module, estimator))
        function = _in_reward(module, utils, estimator)
        yield Setting("apply_reward_kl, REINFORCE", options, defaults, "KL penalty in the reward", function)
    yield Setting(
        "SDPOLoss",
        {},
        {},
        "KL(student || teacher)",
        _distillation(load("distillation.loss", "distillation.rollout", "distillation.train")),
    )
