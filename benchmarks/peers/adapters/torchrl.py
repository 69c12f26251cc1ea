"""torchrl: its distillation loss, and the KL of its GRPO loss."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..importing import bare, load, parameter_default
from ..setting import Setting

DISTRIBUTION = "torchrl"


class _Data(dict[Any, Any]):
    """A batch with the methods of a TensorDict that the loss uses."""

    ndim, device = 1, torch.device("cpu")

    def get(self, key: Any, default: Any = None, *, as_list: bool = False) -> Any:
        return super().get(key, default)

    def select(self, *keys: Any) -> "_Data":
        return self


def _distillation(module: Any, **options: Any) -> Any:
    keys = module.DistillationLoss._AcceptedKeys()
    whole = bare(module.DistillationLoss, actor_network=lambda data: data, **options)
    whole.__dict__ |= {"_tensor_keys": keys, "assistant_only": True, "reduction": "mean", "tokenizer": None}
    whole._runtime = whole._device_fallback = torch.empty(0)

    def loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        rows = {key: list(values) for key, values in {"p": logprobs, "q": ref_logprobs, "m": mask}.items()}
        data = _Data({keys.history: None, keys.log_probs: rows["p"], keys.teacher_log_prob: rows["q"]})
        data |= {("masks", "all_assistant_mask"): rows["m"], ("masks", "all_attention_mask"): rows["m"]}
        return module.DistillationLoss.forward(whole, data).loss_distill

    return loss


def _to_reference(kind: Any) -> Any:
    def loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        data = _Data(_cur_log_prob=logprobs)
        return kind._kl_to_ref(bare(kind), data, ref_log_prob=ref_logprobs, coeff=0.1, mask=mask)[0]

    return loss


def settings() -> Iterator[Setting]:
    """The losses of torchrl."""
    module = load("torchrl.objectives.llm.distillation")
    constructor = module.DistillationLoss.__init__
    defaults = {
        key: parameter_default(constructor, key) for key in ("kl_direction", "normalize_by_seq_length")
    }
    for by_length in (True, False):  # the other direction is for samples of the teacher
        options = defaults | {"normalize_by_seq_length": by_length}
        called = "KL(student || teacher), whose expected gradient is that of the forward KL"
        yield Setting("DistillationLoss", options, defaults, called, _distillation(module, **options))
    grpo = load("torchrl.objectives.llm.grpo").GRPOLoss
    yield Setting(
        "GRPOLoss, kl_to_ref_coeff", {}, {}, "KL divergence to the reference policy", _to_reference(grpo)
    )
