"""ms-swift: GRPO, a KL in the reward, GKD, and a teacher's log ratio as advantage."""

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..importing import bare, load
from ..setting import Setting

DISTRIBUTION = "ms-swift"
# Parts of it that load models, data and engines
ENGINES = [
    f"swift.{name}"
    for name in (
        "arguments", "dataloader", "dataset", "infer_engine", "megatron", "model", "rewards", "rollout",
        "template", "trainers",
    )
]  # fmt: skip


def _trainer(kind: Any, loss_type: str, beta: float) -> Any:
    trainer = bare(
        kind, model=SimpleNamespace(training=True), compute_entropy=False, overlong_filter=False, beta=beta,
        kl_in_reward=False, rollout_importance_sampling_mode=None, log_rollout_offpolicy_metrics=False,
        disable_rollout_importance_sampling=True, importance_sampling_level="token", _has_teacher=False,
        loss_type=loss_type, off_policy_sequence_mask_delta=None, epsilon_low=0.2, epsilon_high=0.2,
        args=SimpleNamespace(delta=None, top_entropy_quantile=1.0), max_completion_length=8,
        sdar_loss_coef=0.0,
        chord_sft_iterator=None, accelerator=SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    trainer._undo_gradient_accumulation_scaling = lambda loss: loss
    return trainer


def _policy_loss(
    trainer: Any, batch: Any, logprobs: Tensor, mask: Tensor, **tensors: Tensor | None
) -> Tensor:
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, None)
    lengths = mask.sum(-1)
    whole = batch(completion_mask=mask, truncated_mask=lengths < 0, seq_lengths=lengths, **tensors)
    whole.num_items_in_batch = lengths.sum()
    return trainer._compute_loss_and_metrics(None, {}, whole)[0]


def _grpo(kind: Any, batch: Any, loss_type: str) -> Any:
    trainer = _trainer(kind, loss_type, 0.04)

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        tensors = {"ref_per_token_logps": ref_logprobs, "old_per_token_logps": old_logprobs}
        return _policy_loss(
            trainer, batch, logprobs, mask, **tensors, advantages=torch.zeros_like(ref_logprobs)
        )

    return loss


def _in_reward(kind: Any, batch: Any, advantage: Any) -> Any:
    """Rewards of 0 with the KL, RLOO's advantages, and the policy's loss."""
    trainer = _trainer(kind, "grpo", 0.0)

    def loss(logprobs: Tensor, old_logprobs: Tensor, kl_rewards: Tensor, mask: Tensor) -> Tensor:
        count = len(mask)
        values, _ = advantage.compute_advantages(
            torch.zeros(count, 1, dtype=logprobs.dtype), torch.ones(1, dtype=logprobs.dtype), count, "rloo",
            "none", kl_in_reward=True, beta=0.04, kl_values=-kl_rewards,
        )  # fmt: skip
        values = advantage.expand_advantage_to_per_token(values, mask)
        return _policy_loss(
            trainer, batch, logprobs, mask, old_per_token_logps=old_logprobs, advantages=values
        )

    return loss


def _teacher(kind: Any, batch: Any, advantage: Any) -> Any:
    trainer = _trainer(kind, "grpo", 0.0)

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        values = advantage.expand_advantage_to_per_token(
            logprobs.new_zeros(len(mask)), mask, ref_logprobs, old_logprobs, teacher_kl_coef=1.0
        )
        return _policy_loss(
            trainer, batch, logprobs, mask, old_per_token_logps=old_logprobs, advantages=values
        )

    return loss


def _gkd(module: Any, beta: float) -> Any:
    def loss(logits: Tensor, ref_logits: Tensor, labels: Tensor) -> Tensor:
        teacher = module.TeacherOutput(full_logits=ref_logits, labels=labels)
        total, count = module.gkd_loss(logits, teacher, labels, beta, 1.0)
        return total / count

    return loss


def _gkd_topk(module: Any, beta: float) -> Any:
    def loss(logits: Tensor, topk_logprobs: Tensor, topk_ids: Tensor, labels: Tensor) -> Tensor:
        teacher = module.TeacherOutput(topk_logprobs=topk_logprobs, topk_indices=topk_ids, labels=labels)
        total, count = module.gkd_loss(logits, teacher, labels, beta, 1.0)
        return total / count

    return loss


def settings() -> Iterator[Setting]:
    """The losses of ms-swift; their defaults are those of its argument classes' `__post_init__`."""
    gkd = load("swift.rlhf_trainers.gkd_loss", *ENGINES)
    for beta, called in {0.0: "forward KL", 0.5: "JSD", 1.0: "reverse KL"}.items():
        yield Setting("gkd_loss", {"beta": beta}, {"beta": 0.5}, called, _gkd(gkd, beta))
        options = {"beta": beta, "gkd_logits_topk": 3}
        yield Setting("gkd_loss", options, {"beta": 0.5}, called, _gkd_topk(gkd, beta))
    advantage = load("swift.rl_core.advantage", *ENGINES)
    trainer = load("swift.rlhf_trainers.grpo_trainer", *ENGINES).GRPOTrainer
    batch = load("swift.rl_core.data", *ENGINES).GRPOBatch
    defaults = {"loss_type": "grpo", "kl_in_reward": False}
    for kind in ("grpo", "bnpo", "dapo"):
        options = {"loss_type": kind, "kl_in_reward": False}
        yield Setting("GRPOTrainer", options, defaults, "KL divergence (k3)", _grpo(trainer, batch, kind))
    yield Setting("GRPOTrainer, RLOO", {}, {}, "KL in the reward", _in_reward(trainer, batch, advantage))
    called = "the correct OPD-RL policy-gradient signal"
    yield Setting("GRPOTrainer, teacher_kl_coef", {}, {}, called, _teacher(trainer, batch, advantage))
