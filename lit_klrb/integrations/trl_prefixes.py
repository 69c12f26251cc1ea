"""Rewards of the completion so far in TRL's trainers, as baselines of the tokens that follow."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_klrb.distributed import gather_rows
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.estimators import KLEstimator
from lit_klrb.functional.baselines import values_before
from lit_klrb.integrations.trl_batches import total_rewards


def check_prefix_rewards(trainer: Any, estimator: KLEstimator, every: int | None) -> None:
    """Check that a trainer of TRL can call its rewards with the first tokens of completions."""
    if every is None:
        return
    check_at_least(1, prefix_reward_every=every)
    if hasattr(trainer, "teacher_model"):
        reason = "has no effect in distillation, which has no reward"
    elif not estimator.reads_prefix_rewards:
        reason = f"has no effect with {estimator.label}; RaoBlackwellControlVariate uses them"
    elif getattr(trainer, "tools", None) or getattr(trainer, "environments", None):
        reason = "is not supported with tools or environments, whose rewards are of whole completions"
    else:
        return
    raise ConfigurationError(f"{every} {reason}", key="prefix_reward_every")


def prefix_rewards_of(
    trainer: Any,
    prompts: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    calculate: Callable[[list[Any], list[Any]], Tensor],
) -> Tensor | None:
    """The rewards of what precedes each token, of the completions of all processes, shape [B, T].

    What reward functions log of unfinished completions is discarded.

    Args:
        trainer: The trainer, with `kl_prefix_stride`, the number of tokens between two calls or None.
        prompts: This process's prompts, one for each completion.
        completion_ids: The tokens of their completions, without padding.
        calculate: The rewards of each function and of the completions of all processes, shape [B, functions],
            given this process's completions as TRL decodes them, and their tokens.
    """
    if trainer.kl_prefix_stride is None or not trainer.model.training:
        return None

    def value_of(length: int) -> Tensor:
        tokens = [ids[:length] for ids in completion_ids]
        texts = trainer.processing_class.batch_decode(tokens, skip_special_tokens=True)
        if not isinstance(prompts[0], str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        return total_rewards(calculate(texts, tokens), trainer)

    lengths = gather_rows(torch.tensor([len(ids) for ids in completion_ids]))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    logs = trainer._pending_extra_logs, trainer._pending_metrics
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    try:
        return values_before(mask.to(trainer.accelerator.device), trainer.kl_prefix_stride, value_of)
    finally:
        trainer._pending_extra_logs, trainer._pending_metrics = logs
