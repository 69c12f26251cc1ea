"""RLOO: REINFORCE with a leave-one-out baseline and a KL penalty whose estimator is plugged in."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.estimators import EstimatorMemory
from lit_klrb.functional.baselines import values_before
from lit_klrb.models import loading
from lit_klrb.models.generation import Rollout
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.modules.regularised import RewardedModule


@final
@dataclass(kw_only=True, eq=False, repr=False)
class RLOOModule(RewardedModule, OnPolicyModule):
    """Maximises E[reward] − beta · KL(policy‖reference) on completions sampled from the policy.

    Args:
        prefix_rewards: Compute the reward of the completion so far after its first token and after every such
            number of tokens: a baseline of the tokens that follow, without bias, by an estimator with the
            direction prefix_rewards. The reward is then called with unfinished completions, max_new_tokens /
            prefix_rewards times as often; null for never.

    Reference: Kool et al. (2019), "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al.
    (2024), arXiv:2402.14740. Prefix rewards are the potential of Ng, Harada, Russell (1999), "Policy
    invariance under reward transformations".
    """

    prefix_rewards: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_rewards is not None:
            check_at_least(1, prefix_rewards=self.prefix_rewards)

    def setup(self, stage: str) -> None:
        """Check that the estimator uses prefix rewards if they are computed.

        Raises:
            ConfigurationError: If not, besides the reasons of `OnPolicyModule`.
        """
        super().setup(stage)
        if stage == "fit" and self.prefix_rewards is not None and not self.kl_estimator.reads_prefix_rewards:
            raise ConfigurationError(
                f"{self.prefix_rewards} has no effect with {self.kl_estimator.label}; "
                "RaoBlackwellControlVariate uses them",
                key="model.init_args.prefix_rewards",
            )

    def reward_to_come(self, rollout: Rollout, batch: dict[str, Tensor], rewards: Tensor) -> Tensor | None:
        """`TokenStats.reward_to_come` of a rollout, given its training rewards; None if not computed."""
        if self.prefix_rewards is None:
            return None
        try:
            before = values_before(
                rollout.mask, self.prefix_rewards, lambda length: self.rewards(rollout.cut(length), batch)
            )
        except Exception as error:
            error.add_note("model.init_args.prefix_rewards asked for the reward of an unfinished completion")
            raise
        return torch.where(rollout.mask, rewards[:, None] - before, 0)

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The policy of policy_path, or the reference, and the token values that its warm start fitted."""
        if hasattr(self, "memory"):
            start_from_warm_start(self.memory, self.policy_path)
        return self.load_policy()


def start_from_warm_start(memory: EstimatorMemory, policy_path: str | None) -> None:
    """Begin a memory with the token values of rewards that the checkpoint of a warm start has, if any.

    Args:
        memory: The memory; unchanged if its estimator has no token values of rewards.
        policy_path: The warm start, or None.

    Raises:
        ConfigurationError: If the checkpoint does not exist, or the values are damaged.
    """
    if memory.estimator.token_values_predict == "rewards" and policy_path is not None:
        prior = loading.load_token_values("policy_path", policy_path)
        if prior is not None:
            memory.start_from(prior)
