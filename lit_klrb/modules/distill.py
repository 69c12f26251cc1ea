"""On-policy distillation: a student learns a teacher on the student's own completions."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.models.generation import Rollout
from lit_klrb.modules.rloo import RLOOModule


class DistillModule(RLOOModule):
    """Minimises KL(student‖teacher), with the estimators that hold a policy on its leash.

    It is RLOO without a reward: the policy is the student, the reference the teacher; beta only scales the
    gradient. Token-level losses (`RaoBlackwellLoss` with allow_biased) leave out how earlier tokens change
    later KLs; the others do not.

    Args:
        policy_config: Builds a fresh student: `model_type` and what differs from its defaults; it reads the
            teacher's tokens. Give this or policy_path.
        kwargs: See `RLOOModule`; reference_path is the teacher, reward_path is not read.

    Reference: Tang, Munos (2025), arXiv:2506.09477, Section 5.3.
    """

    def __init__(self, *, policy_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        loading.check_one_given(loading.POLICY, policy_config, self.policy_path)
        if self.reference_path is None:
            raise ConfigurationError("is None; name the teacher", key="reference_path")
        self.save_hyperparameters()
        self.policy_config = policy_config

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The student as it is, or with fresh weights drawn from the run's seed."""
        if self.policy_config is None:
            return super().build()
        assert self.reference_path is not None
        tokenizer = loading.load_tokenizer("reference_path", self.reference_path)
        return loading.fresh_model(self.policy_config, tokenizer, self.seed), tokenizer

    def rewards(self, rollout: Rollout) -> Tensor:
        """None: zero for each sequence, [B]."""
        return torch.zeros(len(rollout.tokens), device=rollout.tokens.device)
