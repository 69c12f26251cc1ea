"""RLOO whose baseline of each token is the value of what precedes it, estimated by sampling the rest anew."""

from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor

from lit_klrb.engine.generation import Sampling
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.rollouts.step import reward_to_come
from lit_klrb.seeding import derive_seed


@final
@dataclass(kw_only=True, eq=False, repr=False)
class VineModule(OnPolicyModule):
    """RLOO with values by rollouts at the places where `prefix_reward_every` would take the reward itself.

    The value of a beginning y_<t is the mean reward of `rollouts` completions that the policy samples after
    it, independent of the rest of y, so that the gradient stays without bias. Each costs a reward call and
    the sampling of up to max_new_tokens - t tokens.

    Args:
        rollouts: Completions per value.

    Reference: Kazemnejad et al. (2024), "VinePPO", arXiv:2410.01679, which takes differences of such values
    as advantages in PPO; here they are a baseline of the estimator that prefix rewards are a baseline of.
    """

    rollouts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, rollouts=self.rollouts)
        if self.prefix_reward_every is None:
            raise ConfigurationError("must be given: the places of the values", key="prefix_reward_every")

    def reward_to_come(self, rollout: Rollout, batch: dict[str, Any], rewards: Tensor) -> Tensor:
        """The reward less the value of the completion before each token, shape [B, T]."""
        assert self.prefix_reward_every is not None
        value_of = partial(self.values, batch=batch, rewards=rewards)
        return reward_to_come(rollout, rewards, self.prefix_reward_every, value_of)

    def values(self, begun: Rollout, batch: dict[str, Any], rewards: Tensor) -> Tensor:
        """The value of each completion that is cut, shape [B]; of one that had ended its reward."""
        length = int(begun.mask.sum(1).max())
        open_rows = begun.unfinished(self.pair.ends) & begun.mask[:, length - 1]
        chosen, left = open_rows.nonzero().flatten(), self.max_new_tokens - length
        if not len(chosen) or left < 1:
            return rewards
        continued = self._continued(begun.part(chosen, length), left)
        prompts = (chosen // self.group_size).tolist()
        repeated = {"rows": [batch["rows"][prompt] for prompt in prompts]} if "rows" in batch else {}
        found = self.training_rewards(continued, self.pair.rewards(self.reward, continued, batch | repeated))
        return rewards.index_put((open_rows,), found.view(-1, self.rollouts).mean(1))

    def _continued(self, begun: Rollout, left: int) -> Rollout:
        """`rollouts` completions of each sequence, whose mask begins where its completion began."""
        length = begun.mask.shape[1]
        seed = derive_seed(self.seed, "vine", self.global_step, length)
        prompts = {"tokens": begun.tokens, "attention_mask": begun.attention_mask}
        found = self.pair.sample(prompts, Sampling(self.rollouts, left, self.temperature), seed=seed)
        start = begun.tokens.shape[1] - length
        return Rollout(found.tokens, found.attention_mask, found.attention_mask[:, start:])
