"""open-instruct: the KL in the loss of GRPO."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..importing import field_default, load
from ..setting import Setting

REPOSITORY = "allenai/open-instruct"
FOLDERS = ("open_instruct",)
PATHS = (".",)


def _grpo(module: Any, mean: Any, estimator: int, beta: float) -> Any:
    config = SimpleNamespace(
        loss_fn=module.GRPOLossType.dapo, clip_lower=0.2, clip_higher=0.2, kl_estimator=estimator
    )

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        ratio, zeros = (logprobs - old_logprobs).exp(), torch.zeros_like(ref_logprobs)
        losses, _, kl = module.compute_grpo_loss(logprobs, ratio, zeros, ref_logprobs, config, zeros + 1)
        return mean(losses + beta * kl, mask)

    return loss


def settings() -> Iterator[Setting]:
    """The losses of open-instruct."""
    engine = [f"open_instruct.{name}" for name in ("olmo_core_utils", "data_loader", "vllm_utils", "utils")]
    mean = load("open_instruct.rl_utils", *engine).masked_mean
    module = load("open_instruct.grpo_utils", *engine)
    config = module.GRPOExperimentConfig
    defaults, beta = {"kl_estimator": field_default(config, "kl_estimator")}, field_default(config, "beta")
    names = [
        "linear approximation",
        "quadratic approximation",
        "numerically stable form",
        "importance-weighted",
    ]
    for estimator, called in enumerate(names):
        function = _grpo(module, mean, estimator, beta)
        yield Setting("compute_grpo_loss", {"kl_estimator": estimator}, defaults, called, function)
