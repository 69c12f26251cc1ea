"""Values by rollouts, against all last tokens."""

import pytest
import torch
from single_steps import attached

from lit_klrb.engine.generation import Sampling
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwellControlVariate
from lit_klrb.models.heads import model_inputs
from lit_klrb.reward_functions import IDS
from replication.vine import VineModule


def last_token(texts, columns):
    """The id of a completion's last token, in hundreds."""
    return torch.tensor([ids[-1] / 100 for ids in columns[IDS]])


def test_a_value_is_the_mean_over_all_last_tokens(chain, tmp_path):
    settings = {"kind": VineModule, "prefix_reward_every": 1, "rollouts": 1000, "temperature": 0.05}
    module, batch = attached(chain, tmp_path, RaoBlackwellControlVariate(), **settings)
    module.max_new_tokens, module.sampling, module.reward = 2, Sampling(3, 2, 0.05), last_token
    rollout = module.sample(batch, 0)
    end = module.pair.ends[0]
    rollout.tokens[0, -2:] = end  # one that has ended
    rollout.attention_mask[0, -1] = rollout.mask[0, 1] = False
    rewards = module.pair.rewards(last_token, rollout, batch)
    to_come = module.reward_to_come(rollout, batch, rewards)
    logits = module.policy(**model_inputs(rollout)).logits[:, -1]
    p, ids = (logits / 0.05).softmax(1), torch.arange(logits.shape[1]) / 100
    mean = p @ ids
    error = ((p @ ids.square() - mean.square()) / 1000).sqrt()
    torch.testing.assert_close(to_come[:, 0], rewards)
    assert to_come[0, 1] == 0
    assert module.values(rollout.cut(1), batch, rewards)[0] == rewards[0]
    assert ((rewards - to_come[:, 1] - mean).abs() < 5 * error)[rollout.mask[:, 1]].all()


def test_without_places_it_is_refused():
    with pytest.raises(ConfigurationError, match="prefix_reward_every: must be given"):
        VineModule(policy_path="a", reference_path="b")
