"""On-policy distillation: a student learns from a teacher on completions sampled from the student."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.distributed import gather_rows
from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TokenStats
from lit_klrb.functional.mismatch import Mismatch, mismatch
from lit_klrb.models import loading
from lit_klrb.models.generation import Rollout
from lit_klrb.modules.rloo import OnPolicyModule
from lit_klrb.rewards import NoReward, Reward, load_reward


@final
@dataclass(kw_only=True, eq=False, repr=False)
class DistillModule(OnPolicyModule):
    """Minimises KL(student‖teacher) on completions of the student, with any KL estimator.

    This is RLOO without a reward: the policy is the student, the reference (`reference_path`) the teacher,
    and beta only scales the gradient. The teacher may read another prompt than the student (see
    teacher_system_prompt of the data); it can then be the same model, the policy itself, or the policy with
    its adapter disabled.

    Token-level losses (`RaoBlackwellLoss` with allow_biased) omit the effect of earlier tokens on later KLs;
    unbiased estimators include it.

    Args:
        policy_config: Configuration of a student with new weights: `model_type` and the settings that differ
            from its defaults. The tokenizer is the teacher's. Give either this or policy_path.
        reward_path: A reward to measure beside the KL, such as the share of answers in a wanted format; see
            `RLOOModule`. It has no effect on training.

    Raises:
        ConfigurationError: If not exactly one of policy_config and policy_path is given, or a student with
            new weights has no other teacher.

    Reference: Tang, Munos (2025), arXiv:2506.09477, Section 5.3.
    """

    policy_config: dict[str, Any] | None = None
    reward_path: str | dict[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        loading.check_one_given(loading.POLICY, self.policy_config, self.policy_path)
        if self.reference_path in (None, loading.ITSELF) and self.policy_path is None:
            raise ConfigurationError(
                f"{self.reference_path} needs a student that can teach itself: policy_path in place of "
                "policy_config; or name the teacher",
                key="reference_path",
            )

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The student of policy_path, or a new one initialised from the seed."""
        if self.policy_config is None or self.reference_path is None:
            return self.load_policy()
        tokenizer = loading.load_tokenizer("reference_path", self.reference_path)
        return loading.fresh_model(self.policy_config, tokenizer, self.seed), tokenizer

    def as_read(self, rollout: Rollout, batch: Mapping[str, Any]) -> Rollout:
        """A rollout as the teacher reads it.

        Raises:
            ConfigurationError: If the teacher is the policy, or the policy without its new adapter, and reads
                the same prompts.
        """
        if self.reference_path is None and self.lora is not None and "teacher_tokens" not in batch:
            raise ConfigurationError(
                "None has a KL of 0 to the policy with a new adapter on the same prompts: give the teacher "
                "its own by data.teacher_system_prompt or the column teacher_prompt, or name another",
                key="reference_path",
            )
        return super().as_read(rollout, batch)

    def rollout_metrics(self, rollout: Rollout, stats: TokenStats, rewards: Tensor) -> dict[str, float]:
        """The means, and where student and teacher differ most, see `Mismatch`."""
        ended = ~self.unfinished(rollout) & self.stop_at_eos
        sums = Mismatch(*map(gather_rows, mismatch(stats, rollout.mask, ended)))
        return super().rollout_metrics(rollout, stats, rewards) | sums.metrics()

    def load_reward(self, device: torch.device) -> Reward:
        """The reward that is measured; without one, zero for every text."""
        return NoReward() if self.reward_path is None else load_reward(self.reward_path, device=device)

    def training_rewards(self, rollout: Rollout, rewards: Tensor) -> Tensor:
        """Zero for every completion, less a penalty of those without EOS, shape [B]."""
        return super().training_rewards(rollout, torch.zeros_like(rewards))
