"""axolotl: knowledge distillation from a teacher's most likely tokens; its GRPO is TRL's."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..importing import field_default, load
from ..setting import Setting

DISTRIBUTION = "axolotl"


def _chunk(kind: Any, beta: float, normalise: bool) -> Any:
    """A chunk of the fused loss, divided by the number of tokens as the trainer does."""

    def loss(logits: Tensor, topk_ids: Tensor, topk_logprobs: Tensor, mask: Tensor) -> Tensor:
        logprobs = topk_logprobs[mask]
        if normalise:
            logprobs = logprobs.log_softmax(-1)
        ones = logprobs.new_ones(logprobs.shape)
        return (
            kind.distillation_loss_fn(logits[mask], topk_ids[mask], logprobs, ones, beta, normalise)
            / mask.sum()
        )

    return loss


def settings() -> Iterator[Setting]:
    """The losses of axolotl."""
    kind = load("axolotl.integrations.kd.kernels.liger").LigerFusedLinearKLTopKLogprobFunction
    config = load("axolotl.integrations.kd.args").KDArgs
    defaults = {"kd_beta": field_default(config, "kd_beta")}
    defaults["kd_normalize_topk"] = bool(field_default(config, "kd_normalize_topk"))
    for beta, called in {0.0: "forward KL", 0.5: "symmetric KL", 1.0: "reverse KL"}.items():
        for normalise in (False, True):
            options = {"kd_beta": beta, "kd_normalize_topk": normalise}
            yield Setting("LigerFusedLinearKLTopK", options, defaults, called, _chunk(kind, beta, normalise))
