"""Metrics of a rollout: means over the completions of all processes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_klrb import schema
from lit_klrb.distributed import gather_rows
from lit_klrb.estimators import KLEstimator
from lit_klrb.functional.kl import kl_k3_per_token
from lit_klrb.functional.statistics import clustered_mean
from lit_klrb.rewards import Reward, TrainingReward
from lit_klrb.rollouts.evaluation import Evaluation


def rollout_means(
    evaluation: Evaluation, estimator: KLEstimator, reward: Reward, ends: Sequence[int]
) -> dict[str, float]:
    """Means over the completions of all processes, with standard errors for reward and KL.

    Args:
        evaluation: Completions of this process.
        estimator: The estimator that is trained with.
        reward: The reward, whose own metrics and retries are added.
        ends: The tokens that end a completion.
    """
    (rollout, stats, rewards, *_), summary = evaluation, evaluation.summary()
    values: dict[str, Tensor] = {}
    for name in ("reward", "kl"):
        mean, error = clustered_mean(gather_rows(summary[name]))
        values |= {name: mean, f"{name}_se": error}
    means = {"length": summary["length"], "unfinished": rollout.unfinished(ends).float()}
    if isinstance(reward, TrainingReward):
        means["equal_rewards"] = (summary["reward"] == summary["reward"][:, :1]).all(1).float()
        means["reward_retries"] = rewards.new_tensor([float(reward.retried)])
        reward.retried = 0
        own = reward.metrics().items()
        means |= {f"{schema.LOGGED}{name}": rewards.new_tensor([value]) for name, value in own}
    if estimator.reads_jsd is not None:
        means["divergence"] = estimator.value(stats, rollout.mask)
    if rollout.logprobs is not None:
        mismatch = kl_k3_per_token(rollout.logprobs, stats.logprobs).where(rollout.mask, 0).sum(1)
        means["sampler_kl"] = mismatch
    values |= {name: gather_rows(rows).mean() for name, rows in means.items()}
    # One wait for the GPU instead of one for each
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
