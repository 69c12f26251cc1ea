"""On-policy distillation: a student learns from a teacher on completions sampled from the student."""

from dataclasses import dataclass
from typing import Any, final

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.distributed import gather_rows
from lit_klrb.engine import served
from lit_klrb.errors import ConfigurationError, check_positive
from lit_klrb.estimators.checked import check_served
from lit_klrb.functional import TokenStats
from lit_klrb.functional.mismatch import Mismatch, mismatch
from lit_klrb.models import loading
from lit_klrb.models.dry_run import UnknownModelError, current_dry_run
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.rollouts.pair import Pair
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
        policy_config: Configuration of a student with new weights: `model_type` and the settings that differ
            from its defaults. The tokenizer is the teacher's. Give either this or policy_path.
        served_model: The name of a teacher on its server, if reference_path is an address such as
            http://127.0.0.1:8000/v1; null for the only one that is served.
        served_timeout: Seconds in which a served teacher must answer a request of 16 sequences.

    Raises:
        ConfigurationError: If not exactly one of policy_config and policy_path is given, a student with new
            weights has no other teacher, or a served teacher is given another temperature than 1.

    Reference: Tang, Munos (2025), arXiv:2506.09477, Section 5.3.
    """

    trains_on_reward = False

    policy_config: dict[str, Any] | None = None
    served_model: str | None = None
    served_timeout: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        loading.check_one_given(loading.POLICY, self.policy_config, self.policy_path)
        if self.reference_path in (None, loading.ITSELF) and self.policy_path is None:
            problem = f"{self.reference_path} needs a student that can teach itself"
            remedy = "policy_path in place of policy_config; or name the teacher"
            raise ConfigurationError(f"{problem}: {remedy}", key="reference_path")
        check_positive(served_timeout=self.served_timeout)
        if self.reference_path is not None and self.is_served:
            served.check_address(self.reference_path)
            if self.policy_path is None:
                problem = (
                    "a student with new weights takes its teacher's tokenizer, which a server does not send"
                )
                raise ConfigurationError(f"{problem}; give policy_path", key="policy_config")
            if self.temperature != 1:
                problem = f"must be 1 for a served teacher, got {self.temperature}"
                why = "the log-probabilities of its most likely tokens are known at 1 only"
                raise ConfigurationError(f"{problem}: {why}", key="temperature")
        elif self.served_model is not None:
            problem = f"{self.served_model} needs the address of its server as reference_path"
            raise ConfigurationError(problem, key="served_model")

    @property
    def is_served(self) -> bool:
        """Whether the teacher is in an engine of its own."""
        return served.is_address(self.reference_path)

    def setup(self, stage: str) -> None:
        """Refuse estimators and callbacks that need more of a served teacher than it sends."""
        super().setup(stage)
        if not self.is_served:
            return
        if stage == "fit":
            check_served(self.kl_estimator)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "needs_reference", False):
                raise ConfigurationError(
                    f"trainer.callbacks: {type(callback).__name__} needs all logits of the teacher, of which "
                    f"{self.reference_path} sends the largest; leave it out"
                )

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Refuse prompts on which the teacher is the policy without its new adapter."""
        super().on_validation_batch_start(batch, batch_idx, dataloader_idx)
        if self.reference_path is None and self.lora is not None and "teacher_tokens" not in batch:
            raise ConfigurationError(
                "None has a KL of 0 to the policy with a new adapter on the same prompts: give the teacher "
                "its own by data.teacher_system_prompt or the column teacher_prompt, or name another",
                key="reference_path",
            )

    def load_pair(self) -> Pair:
        """Student and teacher, which may be an engine of its own."""
        if not self.is_served:
            return super().load_pair()
        if current_dry_run():
            raise UnknownModelError(self.reference_path)
        topk = self.kl_estimator.topk if hasattr(self, "memory") else None
        k = served.DEFAULT_K if topk is None else topk.k
        size = len(self.policy.get_output_embeddings().weight)
        address = str(self.reference_path)
        teacher = served.ServedTeacher(address, k, size, self.served_model, self.served_timeout)
        teacher.check_tokenizer(self.tokenizer)
        return self.pair_with(None, teacher)

    def on_validation_start(self) -> None:
        """Refuse to go on with a served teacher that was replaced."""
        super().on_validation_start()
        if self.pair.teacher is not None:
            self.pair.teacher.check_tokenizer(self.tokenizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a served teacher is recognised by."""
        super().on_save_checkpoint(checkpoint)
        if self.pair.teacher is not None:
            checkpoint[PROBE_KEY] = self.pair.teacher.probe

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with another served teacher."""
        super().on_load_checkpoint(checkpoint)
        trainer = trainer_of(self)
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fitting and self.pair.teacher is not None:
            self.pair.teacher.check_same(checkpoint.get(PROBE_KEY))

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The student of policy_path, or a new one initialised from the seed."""
        if self.policy_config is None or self.reference_path is None:
            return super().build_policy()
        tokenizer = loading.load_tokenizer("reference_path", self.reference_path)
        return loading.fresh_model(self.policy_config, tokenizer, self.seed), tokenizer

    def rollout_metrics(self, rollout: Rollout, stats: TokenStats, rewards: Tensor) -> dict[str, float]:
        """The means, and where student and teacher differ most, see `Mismatch`."""
        ended = ~rollout.unfinished(self.pair.ends) & self.stop_at_eos
        sums = Mismatch(*map(gather_rows, mismatch(stats, rollout.mask, ended, rollout.completions)))
        return super().rollout_metrics(rollout, stats, rewards) | sums.metrics()
