"""KL estimators in TRL's `RLOOTrainer`, `GRPOTrainer` and `DistillationTrainer`; made for TRL 1.16.

TRL samples, scores and computes advantages as ever, without a KL; weights and loss are this package's::

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

It runs in several processes (`accelerate launch`, DDP) and with a LoRA policy (`peft_config`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lit_klrb.distributed import gather_rollout, own_rows
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator, LossWeights
from lit_klrb.estimators.checked import checked_loss, checked_weights
from lit_klrb.models.generation import Rollout
from lit_klrb.models.scoring import Scorer

# Entries that are added to TRL's batches, which split and shuffle them by rows.
STATES, BEHAVIOUR, WEIGHT = "kl_reference_states", "kl_behaviour_logprobs", "kl_weights_"
# Settings of TRL's sampling with which completions are not samples from the policy, and what they must be.
SAMPLING = {"top_p": (1.0,), "top_k": (0, None), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}


def with_kl_estimator(trainer: type[Any]) -> type[Any]:
    """A subclass of a trainer of TRL whose KL is computed by an estimator of this package.

    Its constructor takes `kl_estimator` beside the trainer's own arguments. The loss is a sum over tokens and
    a mean over completions, whatever `loss_type` is. The estimator's `off_policy` takes the place of TRL's
    clipping and importance weights.

    For RLOO and GRPO, `args.beta` is the weight of the KL per sequence, in the units of TRL's advantages:
    with GRPO's default, rewards divided by their group's standard deviation.

    For distillation, KL(student‖teacher) is the whole loss. `args.beta`, with which TRL interpolates between
    divergences, must be 1, the reverse KL. The estimator must have `baseline=None`, as TRL samples one
    completion per prompt.

    Args:
        trainer: `trl.RLOOTrainer`, `trl.GRPOTrainer` or `trl.DistillationTrainer`.

    Raises:
        ConfigurationError: If it is another one, such as `GKDTrainer`, which also trains on given texts.
    """
    if not hasattr(trainer, "_generate_and_score_completions"):
        raise ConfigurationError(
            f"{trainer.__name__} is not supported; allowed: RLOOTrainer, GRPOTrainer, DistillationTrainer",
            key="trainer",
        )

    class KLTrainer(trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, kl_estimator: KLEstimator, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check_trainer(self, kl_estimator)
            self.kl_estimator = kl_estimator
            self.kl_scorer: Scorer | None = None

        def _scorer(self) -> Scorer:
            if self.kl_scorer is None:  # models are in place only after the constructor
                self.kl_scorer = scorer_of(self)
            return self.kl_scorer

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            beta, self.beta = self.args.beta, 0.0  # advantages are those of the reward
            try:
                batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            finally:
                self.beta = beta
            mode = "train" if self.model.training else "eval"
            group_size = getattr(self, "num_generations" if mode == "train" else "num_generations_eval", 1)
            with self.accelerator.autocast():
                added, kl = add_weights(batch, self._scorer(), self.kl_estimator, beta, group_size)
            self._metrics[mode]["kl_per_sequence"].append(kl)
            return added

        def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
            def compute() -> Tensor:
                with self.accelerator.autocast():
                    return weighted_loss(inputs, self._scorer(), self.kl_estimator, self.beta)

            loss = inside(model, self.accelerator.unwrap_model(model), compute)
            if self.loss_is_scaled_for_ga and self.model.training:
                loss = loss / self.current_gradient_accumulation_steps
            return loss

    KLTrainer.__name__ = KLTrainer.__qualname__ = f"KL{trainer.__name__}"
    return KLTrainer


def inside(wrapper: nn.Module, model: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """The result of a computation with a model, inside the forward pass of its wrapper.

    DDP averages the gradients of the computation only there.

    Args:
        wrapper: The wrapper, or the model itself.
        model: The model that it wraps.
        compute: The computation.
    """
    if wrapper is model:
        return compute()
    forward = model.forward

    def once() -> Tensor:
        model.forward = forward  # the computation may need it
        return compute()

    model.forward = once
    result: Tensor = wrapper()
    return result


def scorer_of(trainer: Any) -> Scorer:
    """Policy and reference of a trainer of TRL; a policy with an adapter is its own reference without it."""
    unwrap = trainer.accelerator.unwrap_model
    policy, temperature = unwrap(trainer.model), trainer.args.temperature
    inner = policy.get_base_model() if is_peft(policy) else policy
    reference = reference_of(trainer)
    if reference is not None:
        return Scorer(inner, unwrap(reference).eval(), temperature)

    def reading_reference() -> AbstractContextManager[object]:
        from trl.trainer.utils import use_adapter

        # TRL keeps a copy of an adapter whose training continues
        name = "ref" if "ref" in policy.peft_config else None
        context: AbstractContextManager[object] = use_adapter(policy, adapter_name=name)
        return context

    return Scorer(inner, inner, temperature, reading_reference)


def reference_of(trainer: Any) -> Any:
    """The teacher, or the reference; None if that is the policy without its adapter."""
    return trainer.teacher_model if hasattr(trainer, "teacher_model") else trainer.ref_model


def is_peft(model: Any) -> bool:
    """Whether a model is wrapped by peft."""
    return hasattr(model, "get_base_model")


def check_trainer(trainer: Any, estimator: KLEstimator) -> None:
    """Check that the settings of a trainer of TRL are those for which its batches hold whole groups.

    Args:
        trainer: The trainer after its own constructor.
        estimator: The estimator.

    Raises:
        ConfigurationError: If not, or the estimator's gradient is known to be biased.
    """
    if hasattr(trainer, "teacher_model"):
        check_distillation(trainer, estimator)
    elif trainer.args.beta == 0:
        raise ConfigurationError("must not be 0: it is the weight of the estimated KL", key="beta")
    for name, allowed in SAMPLING.items():
        if (given := getattr(trainer.args, name)) not in allowed:
            raise ConfigurationError(
                f"must be {allowed[0]}, got {given}: the KL is that of samples from the policy itself",
                key=name,
            )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigurationError(
            "DeepSpeed and FSDP are not supported, as the heads of the models are read whole; use DDP",
            key="accelerate",
        )
    configs = trainer.model.peft_config.values() if is_peft(trainer.model) else ()
    if any(config.is_prompt_learning for config in configs):
        raise ConfigurationError(
            "prompt learning is not supported, as only the model behind the prompt is read; use LoRA",
            key="peft_config",
        )
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in trainer.model.modules()):
        raise ConfigurationError(
            "must be true, as the policy has dropout: log-probabilities are compared with the reference's",
            key="disable_dropout",
        )
    accumulated = trainer.args.gradient_accumulation_steps
    steps = getattr(trainer.args, "steps_per_generation", accumulated) // accumulated
    estimator.check_trainable(max(1, steps) * getattr(trainer, "num_iterations", 1))


def check_distillation(trainer: Any, estimator: KLEstimator) -> None:
    """Check what only distillation needs.

    Raises:
        ConfigurationError: If there is no teacher, `beta` is another divergence, or the estimator compares
            completions of a prompt.
    """
    if trainer.teacher_model is None:
        raise ConfigurationError("must be a model, got None", key="teacher_model")
    if trainer.args.beta != 1:
        raise ConfigurationError(
            f"must be 1, the reverse KL, got {trainer.args.beta}: the estimators are of KL(student‖teacher)",
            key="beta",
        )
    if estimator.baseline is not None:
        raise ConfigurationError(
            f"must be None, got {estimator.baseline}: DistillationTrainer samples one completion per prompt",
            key="kl_estimator.baseline",
        )


@torch.no_grad()
def add_weights(
    batch: dict[str, Any], scorer: Scorer, estimator: KLEstimator, beta: float, group_size: int
) -> tuple[dict[str, Any], float]:
    """A batch of TRL with the estimator's weights, and the mean of its KL per sequence in nats.

    Weights are computed on the batches of all processes, between which TRL may divide a group.

    Args:
        batch: This process's rows of whole groups, prompt-major: `prompt_ids` and `prompt_mask` [B, P],
            `completion_ids` and `completion_mask` [B, T], and the `advantages` of the rewards [B], if any.
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
    advantages = batch.get("advantages", states.new_zeros(len(states)))
    # Advantages are centred within groups; leave-one-out multiplies centred values by K / (K - 1)
    scale = 1.0 if estimator.baseline is None else (group_size - 1) / group_size
    everyones, mask, rewards = gather_rollout(stats, rollout.mask, scale * advantages.float())
    weights = checked_weights(estimator, everyones, mask, rewards, beta=beta, group_size=group_size)
    weights = weights.map(lambda rows: own_rows(rows, like=rollout.mask))
    added = {WEIGHT + name: field for name, field in weights._asdict().items() if field is not None}
    kl = estimator.value(everyones, mask).mean().item()
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
