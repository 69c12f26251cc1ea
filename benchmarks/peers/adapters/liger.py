"""Liger: the chunks of its fused GRPO and Jensen-Shannon losses."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..importing import load, parameter_default
from ..setting import Setting

DISTRIBUTION = "liger-kernel"


def _grpo(function: Any, **options: Any) -> Any:
    def loss(
        logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, integer_mask: Tensor, advantages: Tensor
    ) -> Tensor:
        return function(
            logprobs, integer_mask, advantages, integer_mask, ref_logprobs, old_logprobs,
            max_completion_length=8, **options,
        )  # fmt: skip

    return loss


def settings() -> Iterator[Setting]:
    """The losses of Liger."""
    grpo = load("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction.ppo_loss_fn
    defaults = {key: parameter_default(grpo, key) for key in ("loss_type", "use_bias_correction_kl")}
    for changes in ({}, {"use_bias_correction_kl": True}, {"loss_type": "grpo"}, {"loss_type": "dr_grpo"}):
        options = defaults | changes
        called = (
            "importance-sampling-corrected KL" if options["use_bias_correction_kl"] else "k3 estimate of KL"
        )
        yield Setting("LigerFusedLinearGRPO", options, defaults, called, _grpo(grpo, **options))
    jsd = load("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDFunction.distillation_loss_fn
    for beta, called in {0.0: "forward KL", 0.5: "JSD", 1.0: "reverse KL"}.items():
        yield Setting(
            "LigerFusedLinearJSD", {"beta": beta}, {"beta": parameter_default(jsd, "beta")}, called,
            lambda logits, ref_logits, labels, beta=beta: jsd(logits, ref_logits, target=labels, beta=beta),
        )  # fmt: skip
