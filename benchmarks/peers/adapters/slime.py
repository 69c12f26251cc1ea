"""slime: a KL in the loss and in the reward, and on-policy distillation."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..hooks import load_hook
from ..importing import argument_defaults, load
from ..setting import HOOK, Setting

REPOSITORY = "THUDM/slime"
FOLDERS = ("slime", "slime_plugins")
PATHS = (".",)
# One process, as Megatron sees it
ONE = SimpleNamespace(
    is_pipeline_last_stage=lambda: True,
    get_context_parallel_world_size=lambda: 1,
    get_context_parallel_rank=lambda: 0,
)


def load_losses() -> Any:
    """The module of its losses, for one process."""
    module = load("slime.backends.megatron_utils.loss", "megatron", "transformer_engine", "sglang")
    module.mpu = sys.modules["slime.backends.megatron_utils.cp_utils"].mpu = ONE  # type: ignore[attr-defined]
    sys.modules["megatron.core"].mpu = ONE  # type: ignore[attr-defined]
    return module


def arguments(**options: Any) -> Namespace:
    """The arguments that the losses read, at their defaults but for the given ones."""
    return Namespace(
        **{
            "use_rollout_logprobs": False, "kl_coef": 0.0, "normalize_advantages": False, "gamma": 1.0,
            "custom_advantage_function_path": None, "advantage_estimator": "grpo", "use_opd": False,
            "use_opsm": False, "use_tis": False, "get_mismatch_metrics": False, "eps_clip": 0.2,
            "eps_clip_high": 0.2, "eps_clip_c": None, "entropy_coef": 0.0, "use_kl_loss": False,
            "use_unbiased_kl": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "rollout_top_p": 1.0,
            "calculate_per_token_loss": False,
            **options,
        }
    )  # fmt: skip


def batch_loss(module: Any, args: Namespace) -> Any:
    """`compute_advantages_and_returns` with rewards of 0, and `policy_loss_function`, over completions."""

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(-1).tolist()
        new, reference, old = (
            [row[:length] for row, length in zip(values, lengths, strict=True)]
            for values in (logprobs, ref_logprobs, old_logprobs)
        )
        masks = [torch.ones_like(row) for row in reference]
        batch = {
            "log_probs": old,
            "ref_log_probs": reference,
            "teacher_log_probs": reference,
            "loss_masks": masks,
        }
        batch |= {"rewards": [0.0] * len(masks), "response_lengths": lengths, "unconcat_tokens": None}
        batch |= {"total_lengths": [length + 1 for length in lengths]}
        args.n_samples_per_prompt = len(masks)
        module.compute_advantages_and_returns(args, batch)
        given = {"log_probs": new, "entropy": [0 * row for row in new]}
        module.get_log_probs_and_entropy = lambda *_, **__: (None, given)
        mean = module.get_sum_of_sample_mean(
            batch["total_lengths"], lengths, masks, None, args.calculate_per_token_loss
        )
        return module.policy_loss_function(args, batch, logprobs, mean)[0] / len(masks)

    return loss


def settings() -> Iterator[Setting]:
    """The losses of slime."""
    module = load_losses()
    shipped = argument_defaults(Path(sys.modules["slime.utils"].__path__[0]) / "arguments.py")
    defaults = {key: shipped[key.replace("_", "-")] for key in ("kl_loss_type", "use_unbiased_kl")}
    for kind, unbiased in (
        ("k1", False),
        ("k2", False),
        ("k3", False),
        ("low_var_kl", False),
        ("k1", True),
        ("k2", True),
        ("k3", True),
    ):
        options = {"kl_loss_type": kind, "use_unbiased_kl": unbiased}
        called = "unbiased KL" if unbiased else "KL loss"
        args = arguments(use_kl_loss=True, kl_loss_coef=0.001, **options)
        yield Setting("--use-kl-loss", options, defaults, called, batch_loss(module, args))
    args = arguments(kl_coef=0.001, advantage_estimator="reinforce_plus_plus")
    yield Setting(
        "--kl-coef, reinforce_plus_plus", {}, {}, "KL penalty for reward shaping", batch_loss(module, args)
    )
    args = arguments(use_opd=True, opd_kl_coef=shipped["opd-kl-coef"], opd_type="megatron")
    yield Setting("--use-opd", {}, {}, "on-policy distillation KL penalty", batch_loss(module, args))
    load_hook("slime_klrb")
    path = "slime_klrb.kl_to_go"
    args = arguments(kl_coef=0.05, custom_advantage_function_path=path, calculate_per_token_loss=True)
    options = {"custom-advantage-function-path": path, "calculate-per-token-loss": True}
    yield Setting("--kl-coef", options, {}, HOOK, batch_loss(module, args))
