"""TRL: GRPO, RLOO, distillation with a local and a served teacher, and self-distillation."""

import os
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from ..importing import bare, field_default, load, parameter_default
from ..setting import Setting, with_mask

DISTRIBUTION = "trl"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def _accelerator() -> SimpleNamespace:
    same = {"gather": lambda values: values, "gather_for_metrics": lambda values: values}
    reduced = {"reduce": lambda values, reduction: values}
    return SimpleNamespace(**same, **reduced, num_processes=1, process_index=0, device=torch.device("cpu"))


def _grpo(kind: Any, **options: Any) -> Any:
    """`GRPOTrainer._compute_loss` with given log-probabilities in place of a model's."""
    args = SimpleNamespace(
        use_bias_correction_kl=options["use_bias_correction_kl"], delta=None, steps_per_generation=1
    )
    trainer = bare(
        kind, beta=0.04, loss_type=options["loss_type"], args=args, accelerator=_accelerator(),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, epsilon_low=0.2, epsilon_high=0.2,
        importance_sampling_level="token", use_vllm=False, current_gradient_accumulation_steps=1,
        max_completion_length=8, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
    )  # fmt: skip

    def loss(
        logprobs: Tensor,
        ref_logprobs: Tensor,
        old_logprobs: Tensor,
        integer_mask: Tensor,
        tokens: Tensor,
        advantages: Tensor,
    ) -> Tensor:
        entropies = torch.zeros_like(logprobs)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
        prompt = torch.zeros(len(tokens), 1, dtype=torch.long)
        inputs = {"prompt_ids": prompt, "prompt_mask": prompt + 1, "completion_ids": tokens}
        inputs |= {"completion_mask": integer_mask, "advantages": advantages}
        inputs |= {"old_per_token_logps": old_logprobs, "ref_per_token_logps": ref_logprobs}
        return trainer._compute_loss(None, inputs | {"num_items_in_batch": integer_mask.sum()})

    return loss


def _rloo(kind: Any) -> Any:
    """`_generate_and_score_completions` with rewards of 0, and `_compute_loss`."""
    trainer = bare(
        kind, beta=0.05, args=MagicMock(per_device_train_batch_size=1), accelerator=_accelerator(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False), ref_model="reference",
        mask_truncated_completions=False, reward_clip_range=None,
        reward_weights=torch.ones(1), reward_func_names=["zero"], normalize_advantages=False,
        epsilon_low=0.2, epsilon_high=0.2, aux_loss_enabled=False, pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0), _metrics={"train": defaultdict(list)},
        _logs=defaultdict(MagicMock), _pending_extra_logs={}, _pending_metrics={}, log_multimodal=False,
    )  # fmt: skip

    def loss(
        logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, integer_mask: Tensor, tokens: Tensor
    ) -> Tensor:
        lengths = integer_mask.sum(-1).tolist()
        width = max(lengths)
        completions = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        trainer.num_generations = len(tokens)
        trainer._generate = lambda prompts: ([[0]] * len(tokens), completions, completions)
        trainer._calculate_rewards = lambda *_: torch.zeros(len(tokens), 1, dtype=logprobs.dtype)

        def scored(model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            values = {"reference": ref_logprobs, "trained": logprobs}.get(str(model), old_logprobs)[:, :width]
            return values, torch.zeros_like(values), None

        trainer._get_per_token_logps_and_entropies = scored
        batch = trainer._generate_and_score_completions([{"prompt": ""}] * len(tokens))
        return trainer._compute_loss("trained", batch)

    return loss


def _chunked(function: Any, beta: float) -> Any:
    """The loss of hidden states and heads, with logits as hidden states and the identity as both heads."""

    def loss(logits: Tensor, ref_logits: Tensor, integer_mask: Tensor) -> Tensor:
        head = torch.eye(logits.shape[-1], dtype=logits.dtype)
        return function(logits, ref_logits, head, head, integer_mask, beta)[0]

    return loss


def _served_reverse(kind: Any, **options: Any) -> Any:
    trainer = bare(kind, beta=1.0, reverse_kl_top_1_mode="sampled", **options)

    def loss(all_logprobs: Tensor, ref_logprobs: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        teacher = {"actual_logprobs": ref_logprobs}
        teacher |= {"topk_logprobs": ref_logprobs[..., None], "topk_token_ids": tokens[..., None]}
        return trainer._compute_server_sparse_top_1_divergence_loss(teacher, all_logprobs, tokens, labels)

    return loss


def _served_forward(kind: Any, **options: Any) -> Any:
    trainer = bare(kind, beta=0.0, **options)

    def loss(all_logprobs: Tensor, topk_logprobs: Tensor, topk_ids: Tensor, labels: Tensor) -> Tensor:
        teacher = {"topk_logprobs": topk_logprobs, "topk_token_ids": topk_ids}
        return trainer._compute_server_forward_kl_loss(teacher, all_logprobs, labels)

    return loss


def settings() -> Iterator[Setting]:
    """The losses of TRL."""
    grpo, grpo_config = (load(f"trl.trainer.grpo_{name}") for name in ("trainer", "config"))
    defaults = {
        key: field_default(grpo_config.GRPOConfig, key) for key in ("loss_type", "use_bias_correction_kl")
    }
    for changes in (
        {},
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "luspo"},
        {"use_bias_correction_kl": False},
    ):
        options = defaults | changes
        called = (
            "importance-sampling-corrected KL" if options["use_bias_correction_kl"] else "KL divergence (k3)"
        )
        yield Setting("GRPOTrainer", options, defaults, called, _grpo(grpo.GRPOTrainer, **options))
    rloo = load("trl.trainer.rloo_trainer").RLOOTrainer
    yield Setting("RLOOTrainer", {}, {}, "KL penalty in the reward", _rloo(rloo))
    distillation = load("trl.trainer.distillation_trainer")
    config = load("trl.trainer.distillation_config").DistillationConfig
    names = {0.0: "forward KL", 0.5: "generalized JSD", 1.0: "reverse KL"}
    for beta, called in names.items():
        function = _chunked(distillation._chunked_divergence_loss, beta)
        yield Setting(
            "DistillationTrainer", {"beta": beta}, {"beta": field_default(config, "beta")}, called, function
        )
    served = load(
        "trl.experimental.server_distillation.server_distillation_trainer"
    ).ServerDistillationTrainer
    config = load("trl.experimental.server_distillation.server_distillation_config").ServerDistillationConfig
    defaults = {key: field_default(config, key) for key in ("beta", "loss_top_k", "loss_add_tail")}
    kinds = (("reverse KL", 1.0, 1, _served_reverse), ("forward KL", 0.0, 3, _served_forward))
    for tail in (True, False):
        for called, beta, k, function_of in kinds:
            options = {"beta": beta, "loss_top_k": k, "loss_add_tail": tail}
            function = function_of(served, loss_add_tail=tail)
            yield Setting("ServerDistillationTrainer", options, defaults, called, function)
    jsd = load("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    for beta, called in names.items():
        yield Setting(
            "GKDTrainer", {"beta": beta}, {"beta": parameter_default(jsd, "beta")}, called,
            lambda logits, ref_logits, labels, beta=beta: jsd(logits, ref_logits, labels=labels, beta=beta),
        )  # fmt: skip
    sdpo = load("trl.experimental.sdpo.loss_utils")
    config = load("trl.experimental.sdpo.sdpo_config").SDPOConfig
    keys = ("distillation_mode", "distillation_alpha", "distillation_add_tail")
    defaults = {key: field_default(config, key) for key in keys}
    modes: dict[str, Any] = {
        "sampled_token": lambda logits, ref_logits, tokens: sdpo.compute_sampled_token_self_distillation_loss(
            logits, ref_logits, tokens, distillation_alpha=1.0
        ),
        "full_logits": lambda logits, ref_logits: sdpo.compute_full_logit_self_distillation_loss(
            logits, ref_logits, distillation_alpha=1.0
        ),
        "topk_logits": lambda logits, ref_logits: sdpo.compute_topk_self_distillation_loss(
            logits, ref_logits, distillation_topk=3, distillation_alpha=1.0, distillation_add_tail=False
        ),
    }
    for mode, function in modes.items():
        yield Setting(
            "SDPOTrainer", defaults | {"distillation_mode": mode}, defaults, "reverse KL", with_mask(function)
        )
