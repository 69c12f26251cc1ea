"""Settings of TRL's trainers: every field is used, replaced with a word, or refused in one line."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import trl
from transformers import GenerationConfig, TrainingArguments

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, RaoBlackwell, RaoBlackwellTopK, TiltedRaoBlackwell
from lit_klrb.integrations.trl import with_kl_estimator
from lit_klrb.integrations.trl_settings import NEUTRAL, REFUSED, REPLACED, check_trainer, replaced_settings

SERVED = RaoBlackwellTopK(k=2, support="reference", baseline=None)
CONFIGS = "RLOOConfig", "GRPOConfig", "DistillationConfig", "ServerDistillationConfig"
# Fields that TRL itself uses before the loss, for models, data, sampling, rewards, advantages and logs.
USED = {
    *("learning_rate", "bf16", "gradient_checkpointing", "logging_steps", "remove_unused_columns"),
    *("model_init_kwargs", "trust_remote_code", "disable_dropout", "shuffle_dataset", "pad_to_multiple_of"),
    *("teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs"),
    *("num_generations", "num_generations_eval", "generation_batch_size", "steps_per_generation"),
    *("max_completion_length", "temperature", "generation_kwargs", "chat_template_kwargs"),
    *("cache_implementation", "use_transformers_continuous_batching", "use_transformers_paged"),
    *("transformers_continuous_batching_config", "max_tool_calling_iterations"),
    *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_group_port"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
    *("reward_weights", "reward_clip_range", "normalize_advantages", "scale_rewards"),
    *("multi_objective_aggregation", "mask_truncated_completions"),
    *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
    "log_completions_hub_repo",
    "ds3_gather_for_generation",  # DeepSpeed is refused
}
# Those that this package reads: the weight of the KL, optimizer steps per rollout, the teacher's address; the
# coefficient of experts is refused by what it is for the model, and the others belong to the entropy bonus.
READ = {"beta", "num_iterations", "teacher_model_server_url", "router_aux_loss_coef"}
READ |= {f"entropy_{name}" for name in ("coef_min", "coef_max", "coef_delta", "target")}


@pytest.fixture(autouse=True)
def quietly_experimental(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def config_class(name):
    from trl.experimental import server_distillation

    return getattr(trl if hasattr(trl, name) else server_distillation, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_a_configuration_is_known(name):
    """A new field of the next release is used, replaced or refused only after somebody has looked at it."""
    sampling = {field for names in NEUTRAL.values() for field in names}
    inherited = {field.name: field.default for field in fields(TrainingArguments)}
    of_trl = {
        field.name
        for field in fields(config_class(name))
        if field.name not in inherited or field.default != inherited[field.name]
    }
    assert of_trl - {*USED, *READ, *sampling, *REFUSED, *REPLACED} == set()


def test_no_field_is_known_twice():
    tables = [USED, READ, {field for names in NEUTRAL.values() for field in names}, {*REFUSED}, {*REPLACED}]
    every = {field.name for name in CONFIGS for field in fields(config_class(name))}
    assert len(set().union(*tables)) == sum(map(len, tables))
    assert set().union(USED, READ, REFUSED, REPLACED) <= every


@pytest.mark.filterwarnings("ignore")
def test_changed_settings_without_effect_are_said_in_one_line(tmp_path):
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "beta": 0.1}
    assert replaced_settings(trl.GRPOConfig(**arguments)) is None
    changed = trl.GRPOConfig(**arguments, loss_type="grpo", top_entropy_quantile=0.2)
    said, _, why = replaced_settings(changed).partition(": ")
    assert said == "no effect of loss_type=grpo, top_entropy_quantile=0.2"
    assert why == "the KL estimator takes the place of TRL's loss"


def trainer_of_trl(**changes):
    """The attributes of a trainer of TRL that are checked."""
    arguments = {
        "beta": 0.1,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "generation_kwargs": None,
        "temperature": 1.0,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
    }
    own = {"model": torch.nn.Dropout(0.0), "num_iterations": 1}
    own |= {"is_deepspeed_enabled": False, "is_fsdp_enabled": False}
    of_arguments = {*arguments, *REFUSED, "teacher_model_server_url"}
    arguments |= {name: value for name, value in changes.items() if name in of_arguments}
    own |= {name: value for name, value in changes.items() if name not in of_arguments}
    return SimpleNamespace(args=SimpleNamespace(**arguments), **own)


PROMPTS = torch.nn.Identity()  # a model with prompts of peft
PROMPTS.get_base_model = torch.nn.Identity
PROMPTS.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
OF_A_FILE = torch.nn.Identity()  # a model whose file says how to sample, of which TRL replaces top_p
OF_A_FILE.generation_config = GenerationConfig(top_p=0.8, no_repeat_ngram_size=3)


@pytest.mark.parametrize(
    ("changes", "estimator"),
    [({}, RaoBlackwell()), ({"teacher_model": object(), "beta": 1.0}, RaoBlackwell(baseline=None))],
)
def test_a_trainer_that_fits_passes(changes, estimator):
    check_trainer(trainer_of_trl(**changes), EstimatorMemory(estimator))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "beta: must not be 0"),
        ({"top_p": 0.9}, r"top_p: must be 1, got 0.9: the KL is that of samples"),
        ({"top_k": 50}, "top_k: must be 0, got 50"),
        ({"generation_kwargs": {"top_p": 0.9}}, "top_p: must be 1, got 0.9"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams: must be 1, got 2"),
        ({"generation_kwargs": {"do_sample": False}}, "do_sample: must be 1, got False"),
        ({"model": OF_A_FILE}, "no_repeat_ngram_size: must be 0, got 3"),
        ({"entropy_coef": 0.01}, "entropy_coef: must be 0.0, got 0.01: the loss has no entropy bonus"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy: must be False, got True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: must be None, got 5.0"),
        (
            {"aux_loss_enabled": True, "router_aux_loss_coef": 0.001},
            "router_aux_loss_coef: must be 0.0, got 0.001: the loss does not balance experts",
        ),
        ({"repetition_penalty": 1.2}, "repetition_penalty: must be 1, got 1.2"),
        ({"is_fsdp_enabled": True}, "accelerate: DeepSpeed and FSDP are not supported"),
        ({"model": PROMPTS}, "peft_config: prompt learning is not supported"),
        ({"model": torch.nn.Sequential(torch.nn.Dropout(0.1))}, "disable_dropout: must be true, as the"),
        ({"steps_per_generation": 4}, "off_policy: must not be none with 2 optimizer steps per rollout"),
        ({"teacher_model": None}, "teacher_model: must be a model, got None"),
        (
            {"teacher_model": object(), "beta": 0.5},
            "beta: must be 1, got 0.5: the divergence is the estimator's",
        ),
        ({"teacher_model": object(), "beta": 1.0}, "kl_estimator.baseline: must be None, got leave_one_out"),
    ],
)
def test_other_trainers_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        check_trainer(trainer_of_trl(**changes), EstimatorMemory(RaoBlackwell()))


def test_distillation_with_token_values_is_refused_as_it_samples_one_completion_per_prompt():
    trainer = trainer_of_trl(teacher_model=object(), beta=1.0)
    with pytest.raises(ConfigurationError, match="kl_estimator: TiltedRaoBlackwell fits token values"):
        check_trainer(trainer, EstimatorMemory(TiltedRaoBlackwell(baseline=None)))


@pytest.mark.parametrize(
    ("changes", "estimator", "message"),
    [
        ({}, RaoBlackwell(baseline=None), "RaoBlackwell needs more than a served teacher sends"),
        ({}, RaoBlackwellTopK(k=2, baseline=None), "no server scores; use reference"),
        ({"temperature": 0.7}, SERVED, "temperature: must be 1 for a served teacher, got 0.7"),
    ],
)
def test_what_a_served_teacher_cannot_send_is_refused(changes, estimator, message):
    settings = {"teacher_model": None, "teacher_model_server_url": "http://127.0.0.1:8000", "beta": 1.0}
    check_trainer(trainer_of_trl(**settings), EstimatorMemory(SERVED))
    with pytest.raises(ConfigurationError, match=message):
        check_trainer(trainer_of_trl(**settings, **changes), EstimatorMemory(estimator))


def test_trainers_with_another_objective_are_refused_and_subclasses_of_ones_own_are_not():
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.gmpo import GMPOTrainer

    for trainer in GKDTrainer, GMPOTrainer:  # the latter is a GRPOTrainer
        message = f"trainer: {trainer.__name__} is not supported; allowed: RLOOTrainer, GRPOTrainer, "
        with pytest.raises(ConfigurationError, match=message):
            with_kl_estimator(trainer)
    with_kl_estimator(type("MyTrainer", (trl.GRPOTrainer,), {}))
