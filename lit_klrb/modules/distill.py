"""On-policy distillation: a student learns from a teacher on completions sampled from the student."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb import schema
from lit_klrb.data.kinds import Row
from lit_klrb.distributed import gather_rows, sharding_mesh
from lit_klrb.engine import served
from lit_klrb.errors import ConfigurationError, check_positive
from lit_klrb.estimators.checked import check_served
from lit_klrb.functional import TokenStats
from lit_klrb.functional.mismatch import Mismatch, mismatch
from lit_klrb.models import loading
from lit_klrb.models.dry_run import UnknownModelError, current_dry_run
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.rollouts.evaluation import Evaluation
from lit_klrb.rollouts.pair import Loaded, Pair
from lit_klrb.rollouts.teachers import teachers_of
from lit_klrb.run.lightning_internals import trainer_of

# The entry of a checkpoint with what a served teacher said of fixed tokens
PROBE_KEY = "served_teacher"


@final
@dataclass(kw_only=True, eq=False, repr=False)
class DistillModule(OnPolicyModule):
    """Minimises KL(student‖teacher) on completions of the student, with any KL estimator.

    This is RLOO without a reward: the policy is the student, the reference (`reference_path`) the teacher,
    and beta only scales the gradient. The teacher may read another prompt than the student (see
    teacher_system_prompt of the data); it can then be the same model, the policy itself, or the policy with
    its adapter disabled.

    Token-level losses (`RaoBlackwellLoss` with allow_biased) omit the effect of earlier tokens on later KLs;
    unbiased estimators include it.

    Args:
        teachers: Several teachers in place of reference_path, as paths or addresses by name: each teaches the
            rows whose column `teacher` has its name. `val/kl/NAME` is the KL on these rows.
        policy_config: Configuration of a student with new weights: `model_type` and the settings that differ
            from its defaults. The tokenizer is the teacher's. Give either this or policy_path.
        served_model: The name of a teacher on its server, if its path is an address such as
            http://127.0.0.1:8000/v1; null for the only one that is served.
        served_timeout: Seconds of silence after which a served teacher's answer for 16 sequences is late.

    Raises:
        ConfigurationError: If not exactly one of policy_config and policy_path is given, a student with new
            weights has no other teacher, or a served teacher is given another temperature than 1.

    Reference: Tang, Munos (2025), arXiv:2506.09477, Section 5.3.
    """

    trains_on_reward = False

    teachers: dict[str, str] | None = None
    policy_config: dict[str, Any] | None = None
    served_model: str | None = None
    served_timeout: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        loading.check_one_given(loading.POLICY, self.policy_config, self.policy_path)
        if self.teachers is not None:
            _check_names(self.teachers, self.reference_path)
        elif self.reference_path in (None, loading.ITSELF) and self.policy_path is None:
            problem = f"{self.reference_path} needs a student that can teach itself"
            remedy = "policy_path in place of policy_config; or name the teacher"
            raise ConfigurationError(f"{problem}: {remedy}", key="reference_path")
        check_positive(served_timeout=self.served_timeout)
        addresses = [path for path in self.teacher_paths.values() if served.is_address(path)]
        for address in addresses:
            served.check_address(address)
        if addresses and self.policy_path is None:
            problem = "a student with new weights takes its teacher's tokenizer, which a server does not send"
            raise ConfigurationError(f"{problem}; give policy_path", key="policy_config")
        if addresses and self.temperature != 1:
            problem = f"must be 1 for a served teacher, got {self.temperature}"
            why = "the log-probabilities of its most likely tokens are known at 1 only"
            raise ConfigurationError(f"{problem}: {why}", key="temperature")
        if self.served_model is not None and not addresses:
            problem = f"{self.served_model} needs the address of its server as reference_path"
            raise ConfigurationError(problem, key="served_model")
        # The index of each evaluated prompt's teacher, by batch
        self._taught: list[Tensor] = []

    @property
    def teacher_paths(self) -> dict[str, str]:
        """The teachers that are named by a path or an address."""
        own = {} if self.reference_path is None else {"": self.reference_path}
        return own if self.teachers is None else self.teachers

    def setup(self, stage: str) -> None:
        """Refuse what needs more of a served teacher than it sends, and teachers that no row names."""
        super().setup(stage)
        if self.teachers is not None:
            if sharding_mesh(self.trainer) is not None:
                raise ConfigurationError("is not supported by fsdp2", key="teachers")
            splits = getattr(self.trainer.datamodule, "rows", {})  # type: ignore[attr-defined]
            _check_rows(splits, list(self.teachers))
        address = next((path for path in self.teacher_paths.values() if served.is_address(path)), None)
        if address is None:
            return
        if stage == "fit":
            check_served(self.kl_estimator)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "needs_reference", False):
                raise ConfigurationError(
                    f"trainer.callbacks: {type(callback).__name__} needs all logits of the teacher, of which "
                    f"{address} sends the largest; leave it out"
                )

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Refuse prompts on which the teacher is the policy without its new adapter."""
        super().on_validation_batch_start(batch, batch_idx, dataloader_idx)
        if not self.teacher_paths and self.lora is not None and "teacher_tokens" not in batch:
            raise ConfigurationError(
                "None has a KL of 0 to the policy with a new adapter on the same prompts: give the teacher "
                "its own by data.teacher_system_prompt or the column teacher_prompt, or name another",
                key="reference_path",
            )

    def load_pair(self) -> Pair:
        """Student and teacher, or teachers, which may be engines of their own."""
        if self.teachers is None:
            path = str(self.reference_path)
            return self._served_pair(path) if served.is_address(path) else super().load_pair()
        pairs, models = {}, {}
        for name, path in self.teachers.items():
            if served.is_address(path):
                pairs[name] = self._served_pair(path)
                continue
            second = Loaded.of(f"teachers.{name}", path)
            models[name] = loading.freeze(second.model)
            pairs[name] = self.pair_with(second)
        self.reference = torch.nn.ModuleDict(models)  # type: ignore[assignment]
        return self.pair_with(None, by_teacher=pairs)

    def _served_pair(self, address: str) -> Pair:
        """The student, and a teacher in an engine of its own."""
        if current_dry_run():
            raise UnknownModelError(address)
        topk = self.kl_estimator.topk if hasattr(self, "memory") else None
        k = served.DEFAULT_K if topk is None else topk.k
        size = len(self.policy.get_output_embeddings().weight)
        teacher = served.ServedTeacher(address, k, size, self.served_model, self.served_timeout)
        teacher.check_tokenizer(self.tokenizer)
        return self.pair_with(None, teacher)

    def on_validation_start(self) -> None:
        """Refuse to go on with a served teacher that was replaced."""
        super().on_validation_start()
        for teacher in self.pair.served:
            teacher.check_tokenizer(self.tokenizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what served teachers are recognised by."""
        super().on_save_checkpoint(checkpoint)
        if self.pair.served:
            checkpoint[PROBE_KEY] = [teacher.probe for teacher in self.pair.served]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with other served teachers."""
        super().on_load_checkpoint(checkpoint)
        trainer = trainer_of(self)
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        probes = checkpoint.get(PROBE_KEY)
        if fitting and isinstance(probes, list):
            for teacher, probe in zip(self.pair.served, probes, strict=False):
                teacher.check_same(probe)

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The student of policy_path, or a new one initialised from the seed."""
        if self.policy_config is None:
            return super().build_policy()
        key, path = next((f"teachers.{name}", path) for name, path in self.teacher_paths.items())
        tokenizer = loading.load_tokenizer(key if self.teachers else "reference_path", path)
        return loading.fresh_model(self.policy_config, tokenizer, self.seed), tokenizer

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Evaluation]:
        """The common evaluation on a batch of prompts, of which each has its teacher."""
        if self.teachers is not None:
            rows: Any = batch.get("rows", [{}])
            self._taught.append(teachers_of(rows, list(self.teachers)))
        return super().validation_step(batch, batch_idx)

    def evaluated_parts(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The KL of each teacher's prompts."""
        if self.teachers is None:
            return {}
        taught = torch.cat(self._taught).to(columns[schema.KL].device)
        self._taught.clear()
        parts = {name: columns[schema.KL][taught == index] for index, name in enumerate(self.teachers)}
        return {f"{schema.KL}/{name}": values for name, values in parts.items() if len(values)}

    def rollout_metrics(self, rollout: Rollout, stats: TokenStats, rewards: Tensor) -> dict[str, float]:
        """The means, and where student and teacher differ most, see `Mismatch`."""
        ended = ~rollout.unfinished(self.pair.ends) & self.stop_at_eos
        sums = Mismatch(*map(gather_rows, mismatch(stats, rollout.mask, ended, rollout.completions)))
        return super().rollout_metrics(rollout, stats, rewards) | sums.metrics()


def _check_names(teachers: Mapping[str, str], reference_path: str | None) -> None:
    if reference_path is not None:
        problem = f"{reference_path} would be one more teacher beside teachers; leave one of the two out"
        raise ConfigurationError(problem, key="reference_path")
    if not teachers or not all(re.fullmatch(r"[\w-]+", name) for name in teachers):
        problem = f"must be paths by names of letters, digits, _ and -, got {', '.join(teachers) or 'none'}"
        raise ConfigurationError(problem, key="teachers")


def _check_rows(splits: Mapping[str, Sequence[Row]], names: Sequence[str]) -> None:
    """Check that each row names a teacher, and that each teacher has rows to train on."""
    for split, rows in splits.items():
        used = teachers_of([row.columns for row in rows], names)
        unused = [name for index, name in enumerate(names) if split == "train" and index not in used]
        if unused:
            problem = f"no row of the training has {unused[0]} in its column teacher"
            raise ConfigurationError(problem, key="teachers")
