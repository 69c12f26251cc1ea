"""Settings of TRL's trainers with which batches are not what an estimator needs, and those it replaces."""

from dataclasses import fields
from typing import Any

from torch import nn

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, KLEstimator
from lit_klrb.estimators.checked import check_served

TRAINERS = ("RLOOTrainer", "GRPOTrainer", "DistillationTrainer", "ServerDistillationTrainer")
# Settings of sampling, transformers' and vLLM's, by the value that, as None, samples from the policy itself.
NEUTRAL = {
    1: (
        *("do_sample", "num_beams", "top_p", "typical_p", "guidance_scale"),
        *("repetition_penalty", "encoder_repetition_penalty"),
    ),
    0: (
        *("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "penalty_alpha"),
        *("presence_penalty", "frequency_penalty", "min_length", "min_new_tokens", "min_tokens"),
    ),
    None: (
        *("top_h", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
        *("sequence_bias", "logit_bias", "forced_bos_token_id", "forced_eos_token_id"),
        "vllm_structured_outputs_regex",
    ),
}
# Terms of TRL's objective that the estimators' does not have, and noise in the policy: the value, and why.
REFUSED = {
    "entropy_coef": (0.0, "the loss has no entropy bonus"),
    "use_adaptive_entropy": (False, "the loss has no entropy bonus"),
    "neftune_noise_alpha": (None, "log-probabilities are compared with the reference's"),
}
# How TRL estimates the gradient, which the estimator does in its place.
REPLACED = (
    *("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "use_bias_correction_kl"),
    *("sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *("top_entropy_quantile", "off_policy_mask_threshold", "cast_lm_head_to_fp32"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    *("loss_top_k", "loss_add_tail", "reverse_kl_top_1_mode"),
)


def check_class(trainer: type[Any]) -> None:
    """Refuse trainers with another objective, such as subclasses in `trl.experimental`."""
    of_trl = (each for each in trainer.__mro__ if each.__module__.split(".")[0] == "trl")
    if next(of_trl, trainer).__name__ not in TRAINERS:
        problem = f"{trainer.__name__} is not supported; allowed: {', '.join(TRAINERS)}"
        raise ConfigurationError(problem, key="trainer")


def is_distillation(trainer: Any) -> bool:
    """Whether a trainer of TRL has a teacher in place of rewards and a reference."""
    return hasattr(trainer, "teacher_model")


def is_served(trainer: Any) -> bool:
    """Whether that teacher is in an engine of its own."""
    return hasattr(trainer.args, "teacher_model_server_url")


def is_peft(model: Any) -> bool:
    """Whether a model is one of peft."""
    return hasattr(model, "get_base_model")


def check_trainer(trainer: Any, memory: EstimatorMemory) -> None:
    """Check that the settings of a trainer of TRL are those for which its batches hold whole groups.

    Raises:
        ConfigurationError: If not, or the estimator's gradient is known to be biased.
    """
    if is_distillation(trainer):
        _check_distillation(trainer, memory.estimator)
    elif trainer.args.beta == 0:
        raise ConfigurationError("must not be 0: it is the weight of the estimated KL", key="beta")
    _check_sampling(trainer)
    for name, (allowed, problem) in REFUSED.items():
        if (value := getattr(trainer.args, name, allowed)) != allowed:
            raise ConfigurationError(f"must be {allowed}, got {value}: {problem}", key=name)
    if getattr(trainer, "aux_loss_enabled", False):
        problem = f"must be 0.0, got {trainer.router_aux_loss_coef}: the loss does not balance experts"
        raise ConfigurationError(problem, key="router_aux_loss_coef")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        problem = "DeepSpeed and FSDP are not supported, as the heads of the models are read whole; use DDP"
        raise ConfigurationError(problem, key="accelerate")
    configs = trainer.model.peft_config.values() if is_peft(trainer.model) else ()
    if any(config.is_prompt_learning for config in configs):
        problem = "prompt learning is not supported, as only the model behind the prompt is read; use LoRA"
        raise ConfigurationError(problem, key="peft_config")
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in trainer.model.modules()):
        problem = "the policy has dropout: log-probabilities are compared with the reference's"
        raise ConfigurationError(f"must be true, as {problem}", key="disable_dropout")
    accumulated = trainer.args.gradient_accumulation_steps
    steps = getattr(trainer.args, "steps_per_generation", accumulated) // accumulated
    memory.check_trainable(max(1, steps) * getattr(trainer, "num_iterations", 1))


def _check_sampling(trainer: Any) -> None:
    """Refuse sampling from another distribution, whoever asks for it."""
    own = getattr(trainer.model, "generation_config", None)
    settings = {} if own is None else vars(own)
    # TRL's settings are in place of those of the model's file, and TRL samples
    settings = settings | {"do_sample": 1} | vars(trainer.args) | (trainer.args.generation_kwargs or {})
    for neutral, names in NEUTRAL.items():
        for name in names:
            if (value := settings.get(name)) not in (neutral, None):
                problem = f"must be {neutral}, got {value}: the KL is that of samples from the policy itself"
                raise ConfigurationError(problem, key=name)


def _check_distillation(trainer: Any, estimator: KLEstimator) -> None:
    """Refuse to distil without a teacher, by another divergence, or by a comparison of completions."""
    if is_served(trainer):
        check_served(estimator)
        if trainer.args.temperature != 1:
            problem = f"must be 1 for a served teacher, got {trainer.args.temperature}"
            why = "the log-probabilities of its most likely tokens are known at 1 only"
            raise ConfigurationError(f"{problem}: {why}", key="temperature")
    elif trainer.teacher_model is None:
        raise ConfigurationError("must be a model, got None", key="teacher_model")
    if (beta := trainer.args.beta) != 1:
        problem = (
            f"must be 1, got {beta}: the divergence is the estimator's, as RaoBlackwell(divergence='jsd')"
        )
        raise ConfigurationError(problem, key="beta")
    samples = "DistillationTrainer samples one completion per prompt"
    if estimator.baseline is not None:
        problem = f"must be None, got {estimator.baseline}: {samples}"
        raise ConfigurationError(problem, key="kl_estimator.baseline")
    if estimator.needs_token_values:
        problem = "fits token values to differences between the completions of a prompt"
        raise ConfigurationError(f"{type(estimator).__name__} {problem}: {samples}", key="kl_estimator")


def replaced_settings(args: Any) -> str | None:
    """One line that names the changed settings of TRL which have no effect; None if there are none."""
    defaults = {field.name: field.default for field in fields(args)}
    values = {name: getattr(args, name) for name in REPLACED if name in defaults}
    changed = [f"{name}={value}" for name, value in values.items() if value != defaults[name]]
    if not changed:
        return None
    return f"no effect of {', '.join(changed)}: the KL estimator takes the place of TRL's loss"
