"""On-policy distillation: a student learns from a teacher on completions sampled from the student."""

from dataclasses import dataclass
from typing import Any, final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.modules.rloo import OnPolicyModule
from lit_klrb.rewards import NoReward, Reward


@final
@dataclass(kw_only=True, eq=False, repr=False)
class DistillModule(OnPolicyModule):
    """Minimises KL(student‖teacher) on completions of the student, with any KL estimator.

    This is RLOO without a reward: the policy is the student, the reference (`reference_path`) the teacher,
    and beta only scales the gradient. The teacher may read another prompt than the student (see
    teacher_system_prompt of the data); it can then be the same model, or the policy itself.

    Token-level losses (`RaoBlackwellLoss` with allow_biased) omit the effect of earlier tokens on later KLs;
    unbiased estimators include it.

    Args:
        policy_config: Configuration of a student with new weights: `model_type` and the settings that differ
            from its defaults. The tokenizer is the teacher's. Give either this or policy_path.

    Raises:
        ConfigurationError: If there is no teacher, or not exactly one of policy_config and policy_path is
            given.

    Reference: Tang, Munos (2025), arXiv:2506.09477, Section 5.3.
    """

    policy_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        loading.check_one_given(loading.POLICY, self.policy_config, self.policy_path)
        if self.reference_path is None:
            raise ConfigurationError("must name the teacher, got None", key="reference_path")
        if self.reference_path == loading.ITSELF and self.policy_path is None:
            raise ConfigurationError(
                "policy needs a student that can teach itself: policy_path in place of policy_config",
                key="reference_path",
            )

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The student of policy_path, or a new one initialised from the seed."""
        if self.policy_config is None or self.reference_path is None:
            return self.load_policy()
        tokenizer = loading.load_tokenizer("reference_path", self.reference_path)
        return loading.fresh_model(self.policy_config, tokenizer, self.seed), tokenizer

    def load_reward(self, device: torch.device) -> Reward:
        """A reward of zero for every text."""
        return NoReward()
