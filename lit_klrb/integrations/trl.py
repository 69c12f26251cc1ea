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
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, KLEstimator
from lit_klrb.estimators.advice import ANNEALED, DEFAULT, WITHOUT_REWARD
from lit_klrb.integrations.trl_batches import add_weights, total_rewards, weighted_loss
from lit_klrb.integrations.trl_checkpoints import MemoryKeeper, load_memory
from lit_klrb.rollouts.scoring import Scorer

# Whether it trains -> TRL's name of the mode, and of the number of completions per prompt
MODES = {True: ("train", "num_generations"), False: ("eval", "num_generations_eval")}
# Settings of TRL's sampling with which completions are not samples from the policy, and what they must be.
SAMPLING = {"top_p": (1.0,), "top_k": (0, None), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}


def with_kl_estimator(trainer: type[Any]) -> type[Any]:
    """A subclass of a trainer of TRL whose KL is computed by an estimator of this package.

    Its constructor takes `kl_estimator` beside the trainer's own arguments, and `final_discount` and
    `final_forward_share`, towards which the estimator's discount and its share of the forward KL change over
    the training. Without an estimator it is that of `fit`: `RaoBlackwellControlVariate()`, and for
    distillation `RaoBlackwell(baseline=None, discount=0.0)` with a final discount of 1.

    The loss is a sum over tokens and a mean over completions, whatever `loss_type` is. The estimator's
    `off_policy` takes the place of TRL's clipping and importance weights. What the estimator remembers is
    saved in TRL's checkpoints, and resumed with them.

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
    _check_class(trainer)

    class KLTrainer(trainer):  # type: ignore[misc]
        def __init__(
            self,
            *args: Any,
            kl_estimator: KLEstimator | None = None,
            final_discount: float | None = None,
            final_forward_share: float | None = None,
            **kwargs: Any,
        ) -> None:
            super().__init__(*args, **kwargs)
            self.kl_memory = memory_of(self, kl_estimator, final_discount, final_forward_share)
            self.add_callback(MemoryKeeper(self.kl_memory))
            self.kl_rewards: Tensor | None = None
            # Those with which the current rollouts of training and evaluation were weighted
            self.kl_token_values: dict[bool, Tensor | None] = {}

        def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
            load_memory(self.kl_memory, resume_from_checkpoint, self.args.output_dir)
            return super().train(resume_from_checkpoint, **kwargs)

        @cached_property  # models are in place only after the constructor
        def kl_scorer(self) -> Scorer:
            return scorer_of(self)

        def _calculate_rewards(self, *args: Any) -> Tensor:
            by_function: Tensor = super()._calculate_rewards(*args)
            self.kl_rewards = total_rewards(by_function, self)
            return by_function

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            beta, self.beta = self.args.beta, 0.0  # advantages are those of the reward
            try:
                batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            finally:
                self.beta = beta
            training, scorer, memory = self.model.training, self.kl_scorer, self.kl_memory
            mode, group_size = MODES[training]
            if training:
                memory.progress = self.state.global_step / self.state.max_steps
            self.kl_token_values[training] = memory.token_values
            with self.accelerator.autocast():
                size, rewards = getattr(self, group_size, 1), self.kl_rewards
                added, kl = add_weights(batch, scorer, memory, beta, size, rewards, observe=training)
            self._metrics[mode]["kl_per_sequence"].append(kl)
            return added

        def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
            token_values = self.kl_token_values[self.model.training]

            def compute() -> Tensor:
                with self.accelerator.autocast():
                    estimator = self.kl_memory.estimator
                    return weighted_loss(inputs, self.kl_scorer, estimator, self.beta, token_values)

            loss = inside(model, self.accelerator.unwrap_model(model), compute)
            if self.loss_is_scaled_for_ga and self.model.training:
                loss = loss / self.current_gradient_accumulation_steps
            return loss

    KLTrainer.__name__ = KLTrainer.__qualname__ = f"KL{trainer.__name__}"
    return KLTrainer


def _check_class(trainer: type[Any]) -> None:
    """Refuse trainers that do not sample."""
    if not hasattr(trainer, "_generate_and_score_completions"):
        allowed = "RLOOTrainer, GRPOTrainer, DistillationTrainer"
        raise ConfigurationError(f"{trainer.__name__} is not supported; allowed: {allowed}", key="trainer")


def memory_of(
    trainer: Any,
    estimator: KLEstimator | None,
    final_discount: float | None,
    final_forward_share: float | None,
) -> EstimatorMemory:
    """The memory of a trainer of TRL, with the estimator of `fit` if none is given."""
    if estimator is None and not hasattr(trainer, "teacher_model"):
        estimator = DEFAULT()
    elif estimator is None:
        first, last = ANNEALED
        estimator = WITHOUT_REWARD(baseline=None, discount=first)
        final_discount = last if final_discount is None else final_discount
    size = len(trainer.model.get_output_embeddings().weight)
    finals = {"final_discount": final_discount, "final_forward_share": final_forward_share}
    memory = EstimatorMemory(estimator, vocabulary_size=size, **finals)
    check_trainer(trainer, memory)
    if memory.passing_bias is not None:
        trainer.accelerator.print(memory.passing_bias)
    return memory


def inside(wrapper: nn.Module, model: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """The result of a computation with a model, inside the forward pass of its wrapper.

    DDP averages the gradients of the computation only there.
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
    inner = policy.get_base_model() if _is_peft(policy) else policy
    # None if that is the policy without its adapter
    reference = trainer.teacher_model if hasattr(trainer, "teacher_model") else trainer.ref_model
    if reference is not None:
        return Scorer(inner, unwrap(reference).eval(), temperature)

    def reading_reference() -> AbstractContextManager[object]:
        from trl.trainer.utils import use_adapter

        # TRL keeps a copy of an adapter whose training continues
        name = "ref" if "ref" in policy.peft_config else None
        context: AbstractContextManager[object] = use_adapter(policy, adapter_name=name)
        return context

    return Scorer(inner, inner, temperature, reading_reference)


def _is_peft(model: Any) -> bool:
    return hasattr(model, "get_base_model")


def check_trainer(trainer: Any, memory: EstimatorMemory) -> None:
    """Check that the settings of a trainer of TRL are those for which its batches hold whole groups.

    Raises:
        ConfigurationError: If not, or the estimator's gradient is known to be biased.
    """
    if hasattr(trainer, "teacher_model"):
        _check_distillation(trainer, memory.estimator)
    elif trainer.args.beta == 0:
        raise ConfigurationError("must not be 0: it is the weight of the estimated KL", key="beta")
    for name, allowed in SAMPLING.items():
        if (given := getattr(trainer.args, name)) not in allowed:
            problem = f"must be {allowed[0]}, got {given}: the KL is that of samples from the policy itself"
            raise ConfigurationError(problem, key=name)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        problem = "DeepSpeed and FSDP are not supported, as the heads of the models are read whole; use DDP"
        raise ConfigurationError(problem, key="accelerate")
    configs = trainer.model.peft_config.values() if _is_peft(trainer.model) else ()
    if any(config.is_prompt_learning for config in configs):
        problem = "prompt learning is not supported, as only the model behind the prompt is read; use LoRA"
        raise ConfigurationError(problem, key="peft_config")
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in trainer.model.modules()):
        problem = "the policy has dropout: log-probabilities are compared with the reference's"
        raise ConfigurationError(f"must be true, as {problem}", key="disable_dropout")
    accumulated = trainer.args.gradient_accumulation_steps
    steps = getattr(trainer.args, "steps_per_generation", accumulated) // accumulated
    memory.check_trainable(max(1, steps) * getattr(trainer, "num_iterations", 1))


def _check_distillation(trainer: Any, estimator: KLEstimator) -> None:
    """Refuse to distil without a teacher, by another divergence, or by a comparison of completions."""
    if trainer.teacher_model is None:
        raise ConfigurationError("must be a model, got None", key="teacher_model")
    if (beta := trainer.args.beta) != 1:
        problem = f"must be 1, the reverse KL, got {beta}: the estimators are of KL(student‖teacher)"
        raise ConfigurationError(problem, key="beta")
    samples = "DistillationTrainer samples one completion per prompt"
    if estimator.baseline is not None:
        problem = f"must be None, got {estimator.baseline}: {samples}"
        raise ConfigurationError(problem, key="kl_estimator.baseline")
    if estimator.needs_token_values:
        problem = "fits token values to differences between the completions of a prompt"
        raise ConfigurationError(f"{type(estimator).__name__} {problem}: {samples}", key="kl_estimator")
