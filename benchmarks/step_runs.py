"""Training cycles of this package and of TRL; each function returns the shares of its stages."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
from datasets import Dataset
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers.logger import DummyLogger
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import lit_klrb.estimators
from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.modules import DistillModule, DPOModule, RLOOModule, SFTModule
from lit_klrb.run.options import prefer_determinism
from replication.studies.model_pairs import now

from . import step_case as case
from .measure import DEVICE
from .throughput import RolloutThroughput
from .turns import Clock


def _in_trl(clock: Clock, steps: int = 1) -> list[TrainerCallback]:
    """Callbacks of TRL's trainer."""
    callback = TrainerCallback()
    callback.on_train_begin = lambda *_, **__: clock.begin()  # type: ignore[method-assign]
    callback.on_step_end = lambda *_, **__: clock.tick(steps)  # type: ignore[method-assign]
    return [callback]


def _in_lightning(clock: Clock, steps: int) -> LambdaCallback:
    return LambdaCallback(
        on_train_start=lambda *_: clock.begin(), on_train_batch_end=lambda *_: clock.tick(steps)
    )


class Stopwatch(Clock):
    """Counts the seconds of each cycle of a trainer that waits for no turns."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def begin(self) -> None:
        """The first cycle begins."""
        self._last = now()

    def tick(self, steps: int) -> None:
        """A step has ended, which is a cycle here."""
        self.seconds.append(now() - self._last)
        self._last = now()


class ShareLogger(DummyLogger):
    """Stores the throughput of the latest rollout."""

    shares: dict[str, float] = {}  # noqa: RUF012

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Store the shares of the time."""
        found = {k.split("share_")[1]: v for k, v in metrics.items() if k.startswith("throughput/share_")}
        self.shares = found or self.shares


class Batches(L.LightningDataModule):
    """Repeats the same batch."""

    def __init__(self, batch: dict[str, Any]) -> None:
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> DataLoader[Any]:
        """Repeats the same batch."""
        return DataLoader([self.batch] * 1000, batch_size=None)


def _fit(
    task: case.Task,
    module: L.LightningModule,
    batch: dict[str, Any],
    clock: Clock,
    cycles: int,
    *callbacks: L.Callback,
    steps: int = 1,
) -> dict[str, float]:
    logger, options = ShareLogger(), SimpleNamespace(accelerator="auto", deterministic=None)
    prefer_determinism(options)
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        deterministic=options.deterministic,
        precision=task.precision,  # type: ignore[arg-type]
        max_steps=cycles * steps,
        logger=logger,
        callbacks=[*callbacks, _in_lightning(clock, steps)],
        gradient_clip_val=1.0,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Batches(batch))
    return logger.shares


def our_rloo(
    task: case.Task, clock: Clock, cycles: int, estimator: str, inner_epochs: int
) -> dict[str, float]:
    """Cycles of `RLOOModule`."""
    plug = getattr(lit_klrb.estimators, estimator)(off_policy="clip", clip_range=case.CLIP_RANGE)
    module = RLOOModule(
        policy_path=str(task.folder),
        reference_path=None if task.lora else str(task.folder),
        lora=task.lora,
        reward_path=f"{case.__name__}:length_reward",
        completions_per_prompt=task.completions_per_prompt,
        max_new_tokens=task.completion_tokens,
        stop_at_eos=False,
        inner_epochs=inner_epochs,
        learning_rate=case.LEARNING_RATE,
    )
    callbacks = KLEstimatorCallback(plug, beta=case.BETA), RolloutThroughput()
    return _fit(task, module, task.batch(), clock, cycles, *callbacks, steps=inner_epochs)


def our_dpo(task: case.Task, clock: Clock, cycles: int) -> dict[str, float]:
    """Steps of `DPOModule`; the reference's log-probabilities are in the batch."""
    module = DPOModule(reference_path=str(task.folder), learning_rate=case.LEARNING_RATE)
    return _fit(task, module, task.pair_batch(), clock, cycles)


def our_sft(task: case.Task, clock: Clock, cycles: int) -> dict[str, float]:
    """Steps of `SFTModule` on prompts with answers, of which all tokens are trained on."""
    module = SFTModule(policy_path=str(task.folder), learning_rate=case.LEARNING_RATE)
    pairs = task.pair_batch()
    return _fit(task, module, {name: pairs[name] for name in ("tokens", "attention_mask")}, clock, cycles)


def our_distill(task: case.Task, clock: Clock, cycles: int) -> dict[str, float]:
    """Steps of `DistillModule` with the loss per token that TRL has."""
    module = DistillModule(
        policy_path=str(task.folder),
        reference_path=str(task.folder),
        completions_per_prompt=task.completions_per_prompt,
        max_new_tokens=task.completion_tokens,
        stop_at_eos=False,
        learning_rate=case.LEARNING_RATE,
    )
    plug = KLEstimatorCallback(lit_klrb.estimators.RaoBlackwellLoss(allow_biased=True))
    return _fit(task, module, task.batch(), clock, cycles, plug, RolloutThroughput())


def our_dtype(task: case.Task) -> str:
    """The type of the weights that a step of `SFTModule` trains."""
    module = SFTModule(policy_path=str(task.folder), learning_rate=case.LEARNING_RATE)
    pairs = task.pair_batch()
    _fit(task, module, {name: pairs[name] for name in ("tokens", "attention_mask")}, Stopwatch(), 1)
    return str(module.policy.dtype)


def our_new_weights(
    config: dict[str, Any], tokenizer: str, batch: dict[str, Any], options: dict[str, Any]
) -> tuple[int, float]:
    """Two steps of `SFTModule` with new weights: their number, and the seconds of the second step."""
    module = SFTModule(policy_config=config, tokenizer_path=tokenizer, **options)
    task, watch = case.Task(Path(tokenizer), [], 1, 1, "bf16-mixed"), Stopwatch()
    _fit(task, module, batch, watch, 2)
    return sum(weight.numel() for weight in module.policy.parameters()), watch.seconds[-1]


def _common(task: case.Task, folder: str, batch_size: int, steps: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": DEVICE.type == "cpu",
        "bf16": task.precision == "bf16-mixed",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": batch_size,
        "max_steps": steps,
        "learning_rate": case.LEARNING_RATE,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }


def trl_rloo(task: case.Task, clock: Clock, cycles: int, inner_epochs: int) -> dict[str, float]:
    """Cycles of TRL's `RLOOTrainer`."""
    with tempfile.TemporaryDirectory() as output:
        trainer = RLOOTrainer(
            model=str(task.folder),
            processing_class=AutoTokenizer.from_pretrained(task.folder),
            reward_funcs=case.trl_length_reward,
            train_dataset=Dataset.from_dict({"prompt": list(task.prompts) * cycles}),
            peft_config=None if task.lora is None else LoraConfig(**task.lora, task_type="CAUSAL_LM"),
            args=RLOOConfig(
                **_common(task, output, task.sequences, cycles * inner_epochs),
                beta=case.BETA,
                disable_dropout=True,
                num_generations=task.completions_per_prompt,
                max_completion_length=task.completion_tokens,
                generation_kwargs={"min_new_tokens": task.completion_tokens},
                num_iterations=inner_epochs,
                epsilon=case.CLIP_RANGE,
                steps_per_generation=1,
            ),
            callbacks=_in_trl(clock, inner_epochs),
        )
        trainer.train()
    return {}


def trl_dpo(task: case.Task, clock: Clock, cycles: int) -> dict[str, float]:
    """Steps of TRL's `DPOTrainer`, with the reference's log-probabilities taken before training."""
    names, rows = ("prompt", "chosen", "rejected"), task.pairs() * cycles
    columns = {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    with tempfile.TemporaryDirectory() as output:
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(task.folder),
            processing_class=AutoTokenizer.from_pretrained(task.folder),
            train_dataset=Dataset.from_dict(columns),
            args=DPOConfig(
                **_common(task, output, task.sequences // 2, cycles),
                disable_dropout=True,
                precompute_ref_log_probs=True,
            ),
            callbacks=_in_trl(clock),
        )
        trainer.train()
    return {}


def trl_sft(task: case.Task, clock: Clock, cycles: int) -> dict[str, float]:
    """Steps of TRL's `SFTTrainer` on the same texts."""
    texts = [prompt + answer for prompt, *pair in task.pairs() for answer in pair] * cycles
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(task.folder),
            processing_class=AutoTokenizer.from_pretrained(task.folder),
            train_dataset=Dataset.from_dict({"text": texts}),
            args=SFTConfig(**_common(task, output, task.sequences, cycles)),
            callbacks=_in_trl(clock),
        )
        trainer.train()
    return {}


def trl_dtype(task: case.Task) -> str:
    """The type of the weights that TRL's `SFTTrainer` trains."""
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=str(task.folder),
            processing_class=AutoTokenizer.from_pretrained(task.folder),
            train_dataset=Dataset.from_dict({"text": [*task.prompts]}),
            args=SFTConfig(**_common(task, output, 1, 1)),
        )
        return str(next(trainer.model.parameters()).dtype)


def trl_distill(task: case.Task, clock: Clock, cycles: int) -> dict[str, float]:
    """Steps of TRL's `DistillationTrainer` with the reverse KL of each token."""
    prompts = [*task.prompts] * task.completions_per_prompt * cycles
    with tempfile.TemporaryDirectory() as output:
        trainer = DistillationTrainer(
            model=str(task.folder),
            teacher_model=str(task.folder),
            processing_class=AutoTokenizer.from_pretrained(task.folder),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            args=DistillationConfig(
                **_common(task, output, task.sequences, cycles),
                beta=1.0,
                disable_dropout=True,
                max_completion_length=task.completion_tokens,
                generation_kwargs={"min_new_tokens": task.completion_tokens},
            ),
            callbacks=_in_trl(clock),
        )
        trainer.train()
    return {}
