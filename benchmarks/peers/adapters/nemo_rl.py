"""NeMo-RL: the KL in the loss of GRPO and in its reward, and distillation."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..importing import field_default, load
from ..setting import Setting

REPOSITORY = "NVIDIA-NeMo/RL"
FOLDERS = ("nemo_rl",)
PATHS = (".",)


def _shifted(values: Tensor) -> Tensor:
    """Values of the tokens after the first, with one of the first before them."""
    return torch.nn.functional.pad(values, (1, 0))


def _clipped(module: Any, **options: Any) -> Any:
    whole = module.ClippedPGLossFn(module.ClippedPGLossConfig(**options))

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        tensors = {"prev_logprobs": old_logprobs, "generation_logprobs": old_logprobs}
        tensors |= {"reference_policy_logprobs": ref_logprobs, "advantages": torch.zeros_like(ref_logprobs)}
        data = {key: _shifted(values) for key, values in tensors.items()}
        data |= {"token_mask": _shifted(mask.to(logprobs.dtype)), "sample_mask": logprobs.new_ones(len(mask))}
        data |= {"input_ids": _shifted(mask.long())}
        return whole(logprobs, data, logprobs.new_tensor(len(mask)), mask.sum())[0]

    return loss


def _distillation(module: Any, utils: Any, kind: str, outside: bool) -> Any:
    whole = module.DistillationLossFn(module.DistillationLossConfig(kl_type=kind, zero_outside_topk=outside))

    def loss(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
        head = ref_logits.topk(3)
        # The last position predicts nothing
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (logits, head.values, head.indices)]
        student, teacher, entropy = utils.get_distillation_topk_logprobs_from_logits(
            *padded, outside, outside
        )
        data = {"token_mask": _shifted(mask.to(logits.dtype)), "sample_mask": logits.new_ones(len(mask))}
        data |= {"input_ids": _shifted(mask.long())}
        return whole(student, teacher, entropy, data, logits.new_tensor(len(mask)), mask.sum())[0]

    return loss


def settings() -> Iterator[Setting]:
    """The losses of NeMo-RL."""
    module = load("nemo_rl.algorithms.loss.loss_functions", "nemo_rl.models", "nemo_rl.utils")
    config = module.ClippedPGLossConfig
    keys = ("reference_policy_kl_type", "token_level_loss", "use_on_policy_kl_approximation")
    defaults = {key: field_default(config, key) for key in keys}
    for changes in (
        {}, {"reference_policy_kl_type": "k2"}, {"reference_policy_kl_type": "k1"},
        {"token_level_loss": False},
        {"use_on_policy_kl_approximation": True},
    ):  # fmt: skip
        options = defaults | changes
        yield Setting("ClippedPGLossFn", options, defaults, "KL regularization", _clipped(module, **options))
    utils = load("nemo_rl.distributed.model_utils")
    config = module.DistillationLossConfig
    defaults = {key: field_default(config, key) for key in ("kl_type", "zero_outside_topk")}
    for kind in ("mixed", "forward", "reverse"):
        for outside in (False, True)[: 1 if kind == "forward" else 2]:
            options = {"kl_type": kind, "zero_outside_topk": outside}
            yield Setting(
                "DistillationLossFn",
                options,
                defaults,
                f"{kind} KL",
                _distillation(module, utils, kind, outside),
            )
