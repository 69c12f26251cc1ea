"""What every module shares: a model, its tokenizer, its optimizer, and checkpoints that stand alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_klrb import schema
from lit_klrb.distributed import check_strategy
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.models.adapters import adapter_settings, add_adapter
from lit_klrb.seeding import derive_seed

REFERENCE_PREFIX = "reference."
BAR_METRICS = {schema.REWARD, schema.KL, schema.LOSS}


class TrainedModule(L.LightningModule, ABC):
    """A model that is trained, and whose checkpoint can be loaded, exported or trained on from anywhere.

    Models are built in `configure_model`, once the trainer is known; `load_from_checkpoint` needs no trainer
    and takes the model from the checkpoint alone.

    Args:
        learning_rate: AdamW's step size at its peak.
        weight_decay: AdamW's decoupled weight decay.
        adam_epsilon: AdamW's epsilon.
        schedule: How the learning rate moves to the end of the run after the warm-up.
        warmup_steps: Optimizer steps in which the learning rate rises from 0.
        gradient_checkpointing: Keep of each block its input only and compute it again in backward: this takes
            less memory and more time.
        compile_backend: What torch.compile makes of the model's blocks in training and scoring, such as
            "inductor" (which needs a C++ compiler, or a GPU); None runs them as they are. Sampling, whose
            shapes change with each token, is never compiled.
        seed: Decides every draw of the module; set by --seed_everything.
    """

    # What is trained; the attribute of that name holds it.
    role: ClassVar[loading.Role]
    # Whether the model's dropout acts in training. Off wherever log-probabilities are compared with those
    # of a rollout or a reference: the ratio at the first inner step is then exactly 1.
    uses_dropout = False
    # Whether the loss has a KL term for an estimator to be plugged into.
    uses_kl_estimator = False

    # The checkpoint that the trainer is about to restore, set by the command line: Lightning itself tells a
    # module only after `configure_model`.
    ckpt_path: str | None = None

    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self,
        *,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        adam_epsilon: float = 1e-8,
        schedule: Literal["constant", "linear", "cosine"] = "constant",
        warmup_steps: int = 0,
        gradient_checkpointing: bool = False,
        compile_backend: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not learning_rate > 0:
            raise ConfigurationError(f"must be positive, got {learning_rate}", key="learning_rate")
        counts = {"weight_decay": weight_decay, "adam_epsilon": adam_epsilon, "warmup_steps": warmup_steps}
        for name, value in counts.items():
            if not value >= 0:
                raise ConfigurationError(f"must be 0 or larger, got {value}", key=name)
        self.seed = seed
        self.learning_rate, self.weight_decay, self.adam_epsilon = learning_rate, weight_decay, adam_epsilon
        self.schedule, self.warmup_steps = schedule, warmup_steps
        self.gradient_checkpointing = gradient_checkpointing
        if compile_backend is not None:
            known = torch.compiler.list_backends(exclude_tags=())
            if compile_backend not in known:
                raise ConfigurationError(
                    f"{compile_backend!r} is none of {', '.join(known)}", key="compile_backend"
                )
        self.compile_backend = compile_backend

    @abstractmethod
    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model to train, and its tokenizer."""

    def prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        """What is trained of the model that `build` made."""
        return model

    @abstractmethod
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one step."""

    @property
    def trained(self) -> PreTrainedModel:
        """The model that is trained."""
        model: PreTrainedModel = getattr(self, self.role.name)
        return model

    @property
    def steps_per_batch(self) -> int:
        """How many training steps in a row the data module serves the same batch for."""
        return 1

    def setup(self, stage: str) -> None:
        """Refuse to train without an end, or in epochs: training data are endless.

        Raises:
            ConfigurationError: Naming the trainer's argument.
        """
        check_strategy(self.trainer)
        if stage != "fit" or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.trainer.max_steps < 0:
            raise ConfigurationError(
                f"trainer.max_steps must say when to end, got {self.trainer.max_steps}: data are endless"
            )
        if self.trainer.limit_train_batches != 1.0:
            raise ConfigurationError(
                f"trainer.limit_train_batches={self.trainer.limit_train_batches} would train on the same "
                "batches again and again: trainer.max_steps says when to end"
            )

    def configure_model(self) -> None:
        """Build the model, unless a checkpoint brings it: the one to go on from, or one loaded before."""
        if self._trainer is None or hasattr(self, self.role.name):
            return
        if self.ckpt_path is not None:
            model, self.tokenizer = loading.load_checkpoint("ckpt_path", self.ckpt_path, self.role)
        else:
            model, self.tokenizer = self.build()
            model = self.prepared(model)
        setattr(self, self.role.name, model)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what makes the checkpoint stand alone."""
        checkpoint[self.role.config_key] = loading.config_dict(self.trained)
        checkpoint[loading.TOKENIZER_KEY] = loading.tokenizer_files(self.tokenizer)
        checkpoint[loading.ADAPTER_KEY] = adapter_settings(self.trained)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take model and tokenizer from the checkpoint where no trainer had them built."""
        if not hasattr(self, self.role.name):
            setattr(self, self.role.name, loading.model_from_checkpoint(checkpoint, self.role))
            self.tokenizer = loading.tokenizer_from_files(checkpoint.get(loading.TOKENIZER_KEY))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The trained state: the frozen reference is left out."""
        state = super().state_dict(*args, **kwargs)
        return {key: value for key, value in state.items() if not key.startswith(REFERENCE_PREFIX)}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """The inverse of `state_dict`: the live reference stays, every other key must match."""
        live = {k: v for k, v in super().state_dict().items() if k.startswith(REFERENCE_PREFIX)}
        return super().load_state_dict({**state_dict, **live}, strict=strict, assign=assign)

    def configure_optimizers(self) -> Any:
        """AdamW on the model, its schedule moving each optimizer step."""
        optimizer = torch.optim.AdamW(
            [parameter for parameter in self.trained.parameters() if parameter.requires_grad],
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            eps=self.adam_epsilon,
        )
        scheduler = get_scheduler(
            self.schedule if self.schedule != "constant" else "constant_with_warmup",
            optimizer,
            num_warmup_steps=self.warmup_steps,
            num_training_steps=self.trainer.max_steps,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Set the model's mode: `from_pretrained` and validation leave it in eval.

        Raises:
            ConfigurationError: If checkpointing is asked for and the architecture has none.
        """
        self.trained.train(self.uses_dropout)
        if self.gradient_checkpointing:
            blocks = [m for m in self.trained.modules() if isinstance(m, GradientCheckpointingLayer)]
            if not blocks:
                raise ConfigurationError(
                    f"{type(self.trained).__name__} has no blocks to checkpoint; leave it out",
                    key="gradient_checkpointing",
                )
            self.trained.activation_checkpointing_enable({"use_reentrant": False})
            for block in blocks:
                block.training = True  # what they go by; the dropout in them stays as it is
        if self.compile_backend is not None:
            self.trained.base_model.compile(backend=self.compile_backend, dynamic=True)

    def log_metrics(self, stage: str, metrics: Mapping[str, Tensor | float], batch_size: int) -> None:
        """Log each metric as `stage/name`, the mean over processes; every stage has the same names."""
        for name, value in metrics.items():
            bar = name in BAR_METRICS
            self.log(f"{stage}/{name}", value, batch_size=batch_size, prog_bar=bar, sync_dist=True)

    def log_evaluation(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Log what an evaluation ended with, the one before the first step included.

        Lightning drops what is logged in that one, so it goes to the loggers directly.
        """
        if not self.trainer.sanity_checking:
            return self.log_metrics(stage, metrics, batch_size=1)
        for logger in self.trainer.loggers:
            logger.log_metrics({f"{stage}/{name}": value for name, value in metrics.items()}, step=0)
        return None


class PolicyModule(TrainedModule, ABC):
    """A language model that is trained.

    Args:
        policy_path: The policy to start from: a hub id, an exported folder or a checkpoint. If it has an
            adapter, that is trained on.
        lora: Train a fresh LoRA adapter instead of all weights: arguments of `peft.LoraConfig`, such as
            {r: 8, lora_alpha: 16}; unless they say otherwise it is on every linear layer but the head.
        kwargs: See `TrainedModule`.
    """

    role = loading.POLICY
    policy: PreTrainedModel

    def __init__(
        self, *, policy_path: str | None = None, lora: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.policy_path, self.lora = policy_path, lora

    def prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model, with a fresh adapter if one is asked for."""
        if self.lora is None:
            return model
        return add_adapter(model, self.lora, derive_seed(self.seed, "adapter"))
