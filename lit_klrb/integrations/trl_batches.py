"""Batches of TRL's trainers: an estimator's weights, and its loss."""

from typing import Any

import torch
from torch import Tensor

from lit_klrb.distributed import gather_rows, own_rows
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, KLEstimator, LossWeights
from lit_klrb.functional import TokenStats
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.scoring import Scorer
from lit_klrb.rollouts.step import Scored, policy_loss, weigh

# Entries that are added to TRL's batches, which split and shuffle them by rows.
STATES, BEHAVIOUR, WEIGHT = "kl_reference_states", "kl_behaviour_logprobs", "kl_weights_"
OBJECTIVE = "kl_objective"


@torch.no_grad()
def add_weights(
    batch: dict[str, Any],
    scorer: Scorer,
    memory: EstimatorMemory,
    beta: float,
    group_size: int,
    rewards: Tensor | None = None,
) -> tuple[dict[str, Any], float]:
    """A batch of TRL with the estimator's weights, and the mean of its KL per sequence in nats.

    Weights are computed on the batches of all processes, between which TRL may divide a group.

    Args:
        batch: This process's rows of whole groups, prompt-major: `prompt_ids` and `prompt_mask` [B, P],
            `completion_ids` and `completion_mask` [B, T], the `advantages` of the rewards [B], if any, and
            the `sampling_per_token_logps` of vLLM [B, T], if any.
        scorer: Policy and reference.
        memory: The estimator, with what it remembers.
        beta: Weight of the KL.
        group_size: Completions per prompt (K).
        rewards: The rewards of the completions of all processes; None if only their advantages are known.
    """
    rollout, states, stats = _score(batch, scorer, memory)
    estimator = memory.estimator
    advantages = batch.get("advantages", states.new_zeros(len(states))).float()
    scored = Scored.everyones(rollout, stats, advantages)
    if "advantages" in batch:
        assert scored.rewards is not None
        rewards = rewards_of(scored.rewards, rewards, estimator, group_size)
    weights = weigh(memory, scored._replace(rewards=rewards), beta=beta, group_size=group_size)
    weights = weights.map(lambda rows: own_rows(rows, like=rollout.mask))
    added = {WEIGHT + name: field for name, field in weights._asdict().items() if field is not None}
    behaviour = batch.get("sampling_per_token_logps", stats.logprobs)
    behaviour = torch.where(behaviour.isnan(), stats.logprobs, behaviour)  # vLLM does not know all
    kl = estimator.value(scored.stats, scored.mask).mean().item()
    return {**batch, **added, STATES: states, BEHAVIOUR: behaviour}, kl


@torch.no_grad()
def add_objective(
    batch: dict[str, Any], scorer: Scorer, memory: EstimatorMemory, beta: float, rewards: Tensor | None
) -> tuple[dict[str, Any], float]:
    """A batch of an evaluation with what training minimises, beta KL - reward, and its mean KL in nats.

    The arguments are those of `add_weights`. Completions without a reward have no objective, NaN.
    """
    rollout, _, stats = _score(batch, scorer, memory)
    kl = memory.estimator.value(stats, rollout.mask)
    own = 0.0 if rewards is None else own_rows(rewards[:, None], like=kl[:, None])[:, 0]
    return {**batch, OBJECTIVE: beta * kl - own}, gather_rows(kl).mean().item()


def _score(
    batch: dict[str, Any], scorer: Scorer, memory: EstimatorMemory
) -> tuple[Rollout, Tensor, TokenStats]:
    """The rollout of a batch of TRL, the reference's states and the token statistics."""
    if "pixel_values" in batch:
        raise ConfigurationError("images are not supported", key="train_dataset")
    states = scorer.reference_states(rollout := rollout_of(batch))
    sums = memory.estimator.topk, memory.estimator.reads_jsd
    return rollout, states, scorer.stats(rollout, states, memory.token_values, *sums)


def total_rewards(by_function: Tensor, trainer: Any) -> Tensor:
    """The rewards from which TRL computes advantages, shape [B]; NaN where no function gives any.

    Args:
        by_function: The rewards of each function, NaN where it gives none, shape [B, functions].
        trainer: The trainer, with the functions' `reward_weights`, and perhaps a `reward_clip_range`.
    """
    rewards: Tensor = (by_function * trainer.reward_weights.to(by_function)).nansum(1)
    clip_range = getattr(trainer, "reward_clip_range", None)
    rewards = rewards if clip_range is None else rewards.clamp(*clip_range)
    return rewards.masked_fill(by_function.isnan().all(1), torch.nan)


def rewards_of(advantages: Tensor, rewards: Tensor | None, estimator: KLEstimator, group_size: int) -> Tensor:
    """Rewards from which an estimator computes the advantages of TRL, shape [B].

    TRL centres rewards within groups and may scale them. An estimator may use the mean of the others' rewards
    as a control variate, which must not depend on the completion's own reward. That of the centred rewards
    does, so the mean of the group is added again.

    Args:
        advantages: TRL's, of whole groups, shape [B].
        rewards: The rewards that they were computed from, shape [B], NaN where there is none, which has the
            advantage 0; None if unknown.
        estimator: The estimator.
        group_size: Completions per prompt (K).

    Example:
        >>> from lit_klrb.estimators import MonteCarlo
        >>> rewards = torch.tensor([1.0, 3.0, 5.0, 5.0])
        >>> rewards_of(torch.tensor([-4.0, 4.0, 0.0, 0.0]), rewards, MonteCarlo(), 2)  # scaled by 2
        tensor([ 2.,  6., 10., 10.])
    """
    if estimator.baseline is None:
        return advantages
    # The scaled rewards less their group's mean, [G, K], which leave-one-out multiplies by K / (K - 1)
    centred = (group_size - 1) / group_size * advantages.view(-1, group_size)
    if rewards is None:
        return centred.flatten()
    groups = rewards.to(centred).view(-1, group_size)
    means = groups.nanmean(1, keepdim=True).nan_to_num()
    deviations = (groups - means).nan_to_num()
    square = deviations.square().sum(1, keepdim=True)
    scale = (centred * deviations).sum(1, keepdim=True) / square
    # Groups of equal rewards do not show by what TRL multiplied them
    known = scale[square > 0]
    scale = torch.where(square > 0, scale, known.min() if len(known) else 1.0)
    return (centred + scale * means).flatten()


def weighted_loss(
    batch: dict[str, Any],
    scorer: Scorer,
    estimator: KLEstimator,
    beta: float,
    token_values: Tensor | None = None,
) -> Tensor:
    """The estimator's loss on rows of the result of `add_weights`, averaged over them; see `policy_loss`."""
    rollout, fields = rollout_of(batch), LossWeights._fields
    weights = LossWeights(**{name: batch[WEIGHT + name] for name in fields if WEIGHT + name in batch})
    settings = {"behaviour_logprobs": batch[BEHAVIOUR], "token_values": token_values}
    return policy_loss(scorer, estimator, rollout, batch[STATES], weights, beta=beta, **settings)[0]


def rollout_of(batch: dict[str, Any]) -> Rollout:
    """Prompts and completions of a batch of TRL."""
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool()
    # Tokens of tools are in the completion, but not sampled from the policy
    sampled = batch["completion_mask"] * batch.get("tool_mask", 1)
    return Rollout(tokens, attention, sampled.bool())
