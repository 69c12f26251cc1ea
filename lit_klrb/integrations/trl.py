"""KL estimators in TRL's `RLOOTrainer` and `GRPOTrainer`; made for TRL 1.16.

TRL samples, scores and computes advantages as ever, without a KL; weights and loss are this package's.

    from trl import RLOOConfig, RLOOTrainer
    from lit_klrb.estimators import RaoBlackwell
    from lit_klrb.integrations.trl import with_kl_estimator

    trainer = with_kl_estimator(RLOOTrainer)(
        model="gpt2",
        args=RLOOConfig(beta=0.05),
        kl_estimator=RaoBlackwell(),
        reward_funcs=reward,
        train_dataset=prompts,
    )
    trainer.train()
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator, LossWeights
from lit_klrb.estimators.checked import checked_loss, checked_weights
from lit_klrb.models.generation import Rollout
from lit_klrb.models.scoring import Scorer

# Entries that are added to TRL's batches, which split and shuffle them by rows.
STATES, BEHAVIOUR, WEIGHT = "kl_reference_states", "kl_behaviour_logprobs", "kl_weights_"


def with_kl_estimator(trainer: type[Any]) -> type[Any]:
    """A subclass of a trainer of TRL whose KL penalty is computed by an estimator of this package.

    Its constructor takes `kl_estimator` beside the trainer's own arguments. `args.beta` is the weight of the
    KL per sequence, in the units of TRL's advantages: with GRPO's default, rewards divided by their group's
    standard deviation. The loss is a sum over tokens and a mean over completions, whatever `loss_type` is.
    The estimator's `off_policy` takes the place of TRL's clipping and importance weights.

    Args:
        trainer: `trl.RLOOTrainer` or `trl.GRPOTrainer`.
    """

    class KLTrainer(trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, kl_estimator: KLEstimator, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check_trainer(self, kl_estimator)
            self.kl_estimator = kl_estimator
            self.kl_scorer: Scorer | None = None

        def _scorer(self) -> Scorer:
            if self.kl_scorer is None:  # models are in place only after the constructor
                policy, reference = map(self.accelerator.unwrap_model, (self.model, self.ref_model))
                self.kl_scorer = Scorer(policy, reference, self.args.temperature)
            return self.kl_scorer

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            beta, self.beta = self.args.beta, 0.0  # advantages are those of the reward
            try:
                batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            finally:
                self.beta = beta
            mode = "train" if self.model.training else "eval"
            group_size = self.num_generations if mode == "train" else self.num_generations_eval
            with self.accelerator.autocast():
                added, kl = add_weights(batch, self._scorer(), self.kl_estimator, beta, group_size)
            self._metrics[mode]["kl_per_sequence"].append(kl)
            return added

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            loss = weighted_loss(inputs, self._scorer(), self.kl_estimator, self.beta)
            if self.loss_is_scaled_for_ga and self.model.training:
                loss = loss / self.current_gradient_accumulation_steps
            return loss

    KLTrainer.__name__ = KLTrainer.__qualname__ = f"KL{trainer.__name__}"
    return KLTrainer


def check_trainer(trainer: Any, estimator: KLEstimator) -> None:
    """Check that the settings of a trainer of TRL are those for which its batches hold whole groups.

    Args:
        trainer: The trainer after its own constructor.
        estimator: The estimator.

    Raises:
        ConfigurationError: If not, or the estimator's gradient is known to be biased.
    """
    if trainer.beta == 0:
        raise ConfigurationError("must not be 0: it is the weight of the estimated KL", key="beta")
    if trainer.ref_model is None:
        raise ConfigurationError(
            "an adapter of peft is not supported: merge it, or train all weights", key="model"
        )
    if trainer.accelerator.num_processes > 1:
        raise ConfigurationError("several processes are not supported", key="num_processes")
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in trainer.model.modules()):
        raise ConfigurationError(
            "must be true, as the policy has dropout: log-probabilities are compared with the reference's",
            key="disable_dropout",
        )
    steps = trainer.args.steps_per_generation // trainer.args.gradient_accumulation_steps
    estimator.check_trainable(max(1, steps) * trainer.num_iterations)


@torch.no_grad()
def add_weights(
    batch: dict[str, Any], scorer: Scorer, estimator: KLEstimator, beta: float, group_size: int
) -> tuple[dict[str, Any], float]:
    """A batch of TRL with the estimator's weights, and the mean of its KL per sequence in nats.

    Args:
        batch: Whole groups, prompt-major: `prompt_ids` and `prompt_mask` [B, P], `completion_ids` and
            `completion_mask` [B, T], and the `advantages` of the rewards [B].
        scorer: Policy and reference.
        estimator: The estimator.
        beta: Weight of the KL.
        group_size: Completions per prompt (K).

    Raises:
        ConfigurationError: If the batch has images.
    """
    if "pixel_values" in batch:
        raise ConfigurationError("images are not supported", key="train_dataset")
    rollout = rollout_of(batch)
    states = scorer.reference_states(rollout)
    stats = scorer.stats(rollout, states, topk=estimator.topk)
    # Advantages are centred within groups; leave-one-out multiplies centred values by K / (K - 1)
    scale = 1.0 if estimator.baseline is None else (group_size - 1) / group_size
    rewards = scale * batch["advantages"].float()
    weights = checked_weights(estimator, stats, rollout.mask, rewards, beta=beta, group_size=group_size)
    added = {WEIGHT + name: field for name, field in weights._asdict().items() if field is not None}
    kl = estimator.value(stats, rollout.mask).mean().item()
    return {**batch, **added, STATES: states, BEHAVIOUR: stats.logprobs}, kl


def weighted_loss(batch: dict[str, Any], scorer: Scorer, estimator: KLEstimator, beta: float) -> Tensor:
    """The estimator's loss on rows of the result of `add_weights`, averaged over them.

    Args:
        batch: Some rows of the batch.
        scorer: Policy and reference.
        estimator: The estimator.
        beta: Weight of the KL.
    """
    rollout, fields = rollout_of(batch), LossWeights._fields
    weights = LossWeights(**{name: batch[WEIGHT + name] for name in fields if WEIGHT + name in batch})
    if estimator.is_fusable:
        clip_range = estimator.clip_range if estimator.off_policy == "clip" else None
        states, behaviour = batch[STATES], batch[BEHAVIOUR]
        return scorer.loss(rollout, states, weights, behaviour, clip_range, topk=estimator.topk)
    stats = scorer.stats(rollout, batch[STATES], topk=estimator.topk)
    return checked_loss(
        estimator, stats, rollout.mask, weights, beta=beta, behaviour_logprobs=batch[BEHAVIOUR]
    )


def rollout_of(batch: dict[str, Any]) -> Rollout:
    """Prompts and completions of a batch of TRL."""
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool()
    # Tokens of tools are in the completion, but not sampled from the policy
    sampled = batch["completion_mask"] * batch.get("tool_mask", 1)
    return Rollout(tokens, attention, sampled.bool())
