"""KL estimators in TRL's trainers that sample from the policy; made for TRL 1.16.

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

from lit_klrb.engine.served import DEFAULT_K, ServedTeacher
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, KLEstimator, RaoBlackwellTopK
from lit_klrb.estimators.advice import ANNEALED, DEFAULT, WITHOUT_REWARD
from lit_klrb.integrations.trl_batches import (
    OBJECTIVE,
    add_objective,
    add_weights,
    total_rewards,
    weighted_loss,
)
from lit_klrb.integrations.trl_checkpoints import MemoryKeeper, load_memory
from lit_klrb.integrations.trl_settings import (
    check_class,
    check_trainer,
    is_distillation,
    is_peft,
    is_served,
    replaced_settings,
)
from lit_klrb.rollouts.scoring import Scorer

# Seconds of silence after which the answer of a served teacher for 16 sequences is late
TIMEOUT = 120.0


def with_kl_estimator(trainer: type[Any]) -> type[Any]:
    """A subclass of a trainer of TRL whose KL is computed by an estimator of this package.

    Its constructor takes `kl_estimator` beside the trainer's own arguments, and `final_discount` and
    `final_forward_share`, towards which the estimator's discount and its share of the forward KL change over
    the training. Without an estimator it is that of `fit`: `RaoBlackwellControlVariate()`, and for
    distillation `RaoBlackwell(baseline=None, discount=0.0)` with a final discount of 1; from a served teacher
    `RaoBlackwellTopK` with these.

    The loss is a sum over tokens and a mean over completions, whatever `loss_type` is. The estimator's
    `off_policy` takes the place of TRL's clipping and importance weights. What the estimator remembers is
    saved in TRL's checkpoints, and resumed with them.

    For RLOO and GRPO, `args.beta` is the weight of the KL per sequence, in the units of TRL's advantages:
    with GRPO's default, rewards divided by their group's standard deviation.

    For distillation, KL(student‖teacher) is the whole loss, or another divergence of the estimator;
    `args.beta`, with which TRL interpolates between divergences, must be 1. The estimator must have
    `baseline=None`, as TRL samples one completion per prompt.

    An evaluation logs the KL per sequence, and as its loss beta times that less the reward, which is what
    training minimises.

    Args:
        trainer: `trl.RLOOTrainer`, `trl.GRPOTrainer`, `trl.DistillationTrainer`, or the
            `ServerDistillationTrainer` of `trl.experimental`, whose server is asked for the estimator's k.

    Raises:
        ConfigurationError: If it is another one, such as `GKDTrainer`, which also trains on given texts.
    """
    check_class(trainer)

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
            self.kl_teacher = served_teacher(self) if is_served(self) else None
            self.kl_rewards: Tensor | None = None
            # Those with which the current rollout was weighted
            self.kl_token_values: Tensor | None = None

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
            return score_rollout(self, batch)

        def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
            return loss_of(self, model, inputs)

    KLTrainer.__name__ = KLTrainer.__qualname__ = f"KL{trainer.__name__}"
    return KLTrainer


def memory_of(
    trainer: Any,
    estimator: KLEstimator | None,
    final_discount: float | None,
    final_forward_share: float | None,
) -> EstimatorMemory:
    """The memory of a trainer of TRL, with the estimator of `fit` if none is given."""
    if estimator is None and not is_distillation(trainer):
        estimator = DEFAULT()
    elif estimator is None:
        first, last = ANNEALED
        own_token: dict[str, Any] = {"baseline": None, "discount": first}
        estimator = WITHOUT_REWARD(**own_token)
        if is_served(trainer):
            estimator = RaoBlackwellTopK(k=DEFAULT_K, support="reference", **own_token)
        final_discount = last if final_discount is None else final_discount
    size = len(trainer.model.get_output_embeddings().weight)
    finals = {"final_discount": final_discount, "final_forward_share": final_forward_share}
    memory = EstimatorMemory(estimator, vocabulary_size=size, **finals)
    check_trainer(trainer, memory)
    for line in (memory.passing_bias, replaced_settings(trainer.args)):
        if line is not None:
            trainer.accelerator.print(line)
    return memory


def score_rollout(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of a trainer of TRL with the estimator's weights; in an evaluation with the objective alone."""
    scorer, memory, rewards = trainer.kl_scorer, trainer.kl_memory, trainer.kl_rewards
    training = trainer.model.training
    if training:
        memory.progress = trainer.state.global_step / trainer.state.max_steps
        trainer.kl_token_values = memory.token_values
    with trainer.accelerator.autocast():
        if training:
            group_size = getattr(trainer, "num_generations", 1)
            batch, kl = add_weights(batch, scorer, memory, trainer.args.beta, group_size, rewards)
        else:
            batch, kl = add_objective(batch, scorer, memory, trainer.args.beta, rewards)
    trainer._metrics["train" if training else "eval"]["kl_per_sequence"].append(kl)
    return batch


def loss_of(trainer: Any, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss of rows of the result of `score_rollout`; in an evaluation without a graph."""
    if not trainer.model.training:
        objective: Tensor = batch[OBJECTIVE]
        return objective.nanmean()

    def compute() -> Tensor:
        with trainer.accelerator.autocast():
            estimator, token_values = trainer.kl_memory.estimator, trainer.kl_token_values
            return weighted_loss(batch, trainer.kl_scorer, estimator, trainer.args.beta, token_values)

    loss = inside(model, trainer.accelerator.unwrap_model(model), compute)
    return loss / trainer.current_gradient_accumulation_steps if trainer.loss_is_scaled_for_ga else loss


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


def served_teacher(trainer: Any) -> ServedTeacher:
    """The teacher on the server of a `ServerDistillationTrainer`, with the k of the estimator."""
    topk = trainer.kl_memory.estimator.topk
    address = f"{trainer.args.teacher_model_server_url.rstrip('/')}/v1"
    k, size = DEFAULT_K if topk is None else topk.k, trainer.kl_memory.vocabulary_size
    try:
        teacher = ServedTeacher(address, k, size, None, TIMEOUT)
        teacher.check_tokenizer(trainer.processing_class)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, key="teacher_model_server_url") from error
    return teacher


def scorer_of(trainer: Any) -> Scorer:
    """Policy and reference of a trainer of TRL; a policy with an adapter is its own reference without it."""
    unwrap = trainer.accelerator.unwrap_model
    policy, temperature = unwrap(trainer.model), trainer.args.temperature
    inner = policy.get_base_model() if is_peft(policy) else policy
    if is_served(trainer):
        return Scorer(inner, inner, temperature, teacher=trainer.kl_teacher)
    # None if that is the policy without its adapter
    reference = trainer.teacher_model if is_distillation(trainer) else trainer.ref_model
    if reference is not None:
        return Scorer(inner, unwrap(reference).eval(), temperature)

    def reading_reference() -> AbstractContextManager[object]:
        from trl.trainer.utils import use_adapter

        # TRL keeps a copy of an adapter whose training continues
        name = "ref" if "ref" in policy.peft_config else None
        context: AbstractContextManager[object] = use_adapter(policy, adapter_name=name)
        return context

    return Scorer(inner, inner, temperature, reading_reference)
