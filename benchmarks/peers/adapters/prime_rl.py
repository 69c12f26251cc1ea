"""prime-rl: its drift penalty towards the sampler, and on-policy distillation."""

from collections.abc import Iterator
from typing import Any

import pydantic
import torch
from torch import Tensor

from ..hooks import load_hook
from ..importing import field_default, load
from ..setting import HOOK, Setting

REPOSITORY = "PrimeIntellect-ai/prime-rl"
FOLDERS = ("src", "packages")
PATHS = ("src", "packages/prime-rl-configs/src")


def batch_loss(module: Any, function: Any, *, rl: bool) -> Any:
    """`compute_loss` of a batch with one of its components."""

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        zeros = list(torch.zeros_like(ref_logprobs))
        count = int(mask.sum())
        return module.compute_loss(
            list(logprobs), list(old_logprobs), list(ref_logprobs), zeros, list(mask),
            None if rl else zeros, None, None if rl else list(mask.to(logprobs.dtype)), function,
            count, count, count,
        )[0]  # fmt: skip

    return loss


def settings() -> Iterator[Setting]:
    """The losses of prime-rl; the reference is the sampler in the first, the model in the second."""
    load("pydantic_config", "pydantic_config").BaseConfig = pydantic.BaseModel
    module = load("prime_rl.trainer.rl.loss")
    config = load("prime_rl.configs.trainer").DefaultLossConfig
    penalty = batch_loss(module, module.setup_rl_loss_fn(config()), rl=True)

    def to_sampler(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        return penalty(logprobs, ref_logprobs, ref_logprobs, mask)

    defaults = {"kl_tau": field_default(config, "kl_tau")}
    yield Setting("default_loss_fn", defaults, defaults, "Kimi-K2.5 KL loss", to_sampler)
    function = batch_loss(module, None, rl=False)
    yield Setting("ref_kl_loss_fn", {}, {}, "the reverse KL to the reference model", function)
    load_hook("prime_klrb")
    custom = load("prime_rl.configs.trainer").CustomLossConfig(import_path="prime_klrb.completions_kl")
    function = batch_loss(module, module.setup_rl_loss_fn(custom), rl=True)
    yield Setting("setup_rl_loss_fn", {"import_path": "prime_klrb.completions_kl"}, {}, HOOK, function)
