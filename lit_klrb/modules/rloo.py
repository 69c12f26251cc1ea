"""REINFORCE with a leave-one-out baseline, on a KL leash whose estimator is plugged in."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_klrb.distributed import gather, stacked
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator, LossWeights, RaoBlackwell
from lit_klrb.functional import TokenStats
from lit_klrb.functional.statistics import clustered_mean
from lit_klrb.models.generation import Rollout, generate_completions
from lit_klrb.models.vllm import VLLMBackend
from lit_klrb.modules.regularised import RegularisedModule
from lit_klrb.modules.stopwatch import Stopwatch
from lit_klrb.seeding import derive_seed

EXPERIENCE_KEY = "experience"


class Experience(NamedTuple):
    """A rollout and what was computed on the whole of it, before any split: detached, prompt-major.

    Args:
        rollout: B sequences with T completion positions.
        reference_states: What the scorer keeps of the reference, [B, T, D].
        behaviour_logprobs: Log-probabilities the completions were drawn with, [B, T].
        rewards: What each completion is trained for, [B]: its reward, less the penalty if it has no end.
        weights: The estimator's weights of the loss, [B, T].
        metrics: What is logged of it at each of its steps.
    """

    rollout: Rollout
    reference_states: Tensor
    behaviour_logprobs: Tensor
    rewards: Tensor
    weights: LossWeights
    metrics: dict[str, float]

    def rows(self, rows: slice) -> "Experience":
        """The same for some of the sequences."""
        tensors: dict[str, Any] = {k: v[rows] for k, v in self._asdict().items() if isinstance(v, Tensor)}
        weights = self.weights.map(lambda field: field[rows])
        return self._replace(rollout=self.rollout.rows(rows), weights=weights, **tensors)


class RLOOModule(RegularisedModule):
    """Maximises E[reward] − beta · KL(policy‖reference) on completions the policy samples itself.

    One rollout serves inner_epochs · mini_batches optimizer steps. Everything that couples sequences (the
    leave-one-out baseline, fitted coefficients) is computed once, on the whole rollout; the estimator that
    does so, and beta, are plugged in by `KLEstimatorCallback` (the keys under kl).

    Args:
        inner_epochs: Passes over each rollout; after the first step the completions are off-policy, see
            `off_policy` of the estimator.
        mini_batches: Optimizer steps a pass; must divide the prompts of a batch.
        missing_eos_penalty: Taken from the reward of a completion that max_new_tokens cut off, in training
            alone; what is logged as reward is without it, and `train/unfinished` the share of these.
        rollout_backend: What samples in training. vllm (to be installed apart) is for large models on GPUs;
            its draws are not repeated bit for bit.
        vllm_options: Arguments of `vllm.LLM`, such as {gpu_memory_utilization: 0.4}.
        kwargs: See `RegularisedModule`.
    """

    uses_kl_estimator = True
    kl_estimator: KLEstimator
    beta: float

    def __init__(
        self,
        *,
        inner_epochs: int = 1,
        mini_batches: int = 1,
        missing_eos_penalty: float = 0.0,
        rollout_backend: Literal["transformers", "vllm"] = "transformers",
        vllm_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not missing_eos_penalty >= 0 or (missing_eos_penalty and not self.stop_at_eos):
            raise ConfigurationError(
                "must be 0 or larger, and 0 unless stop_at_eos, got "
                f"{missing_eos_penalty} with stop_at_eos={self.stop_at_eos}",
                key="missing_eos_penalty",
            )
        for name, value in (("inner_epochs", inner_epochs), ("mini_batches", mini_batches)):
            if value < 1:
                raise ConfigurationError(f"must be at least 1, got {value}", key=name)
        if self.sampling.completions_per_prompt < 2:
            raise ConfigurationError(
                "must be at least 2 for the leave-one-out baseline, "
                f"got {self.sampling.completions_per_prompt}",
                key="completions_per_prompt",
            )
        self.save_hyperparameters()
        self.inner_epochs, self.mini_batches = inner_epochs, mini_batches
        self.missing_eos_penalty = missing_eos_penalty
        self.backend = VLLMBackend(vllm_options) if rollout_backend == "vllm" else generate_completions
        self.stopwatch = Stopwatch()
        # The rollout in use; kept by checkpoints.
        self.experience: Experience | None = None

    def setup(self, stage: str) -> None:
        """Refuse to train without an estimator.

        Raises:
            ConfigurationError: If none was plugged in.
        """
        super().setup(stage)
        if stage == "fit" and not hasattr(self, "kl_estimator"):
            raise ConfigurationError(
                f"{type(self).__name__} needs a KLEstimatorCallback among the trainer's callbacks"
            )

    @property
    def steps_per_batch(self) -> int:
        """Training steps that one rollout serves."""
        return self.inner_epochs * self._splits

    @property
    def _splits(self) -> int:
        return self.mini_batches * self.trainer.accumulate_grad_batches

    @property
    def last_rollout(self) -> tuple[float, int]:
        """Mean KL in nats of the newest rollout, and how many completions it has, in all processes."""
        assert self.experience is not None
        return self.experience.metrics["kl"], len(self.experience.rewards) * self.trainer.world_size

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Sample and weigh a rollout where a new one is due; the loss of this step's share of it."""
        number, step = divmod(batch_idx, self.steps_per_batch)
        if step == 0:
            self.experience = self.collect(batch, number)
        assert self.experience is not None
        loss = self.loss_of(self._share(self.experience, step % self._splits))
        self.log_metrics("train", self.experience.metrics, batch_size=len(batch["tokens"]))
        self.log_metrics("train", {"loss": loss.detach()}, batch_size=len(batch["tokens"]))
        return loss

    def loss_of(self, experience: Experience, beta: float | None = None) -> Tensor:
        """The estimator's loss, through the fused operation where that can express it.

        Args:
            experience: Sequences and their weights.
            beta: That the weights were made with; the run's by default.
        """
        rollout, reference_states, behaviour_logprobs, _, weights, _ = experience
        estimator, beta = self.kl_estimator, self.beta if beta is None else beta
        if estimator.is_fusable:
            clip_range = estimator.clip_range if estimator.off_policy == "clip" else None
            return self.scorer.loss(rollout, reference_states, weights, behaviour_logprobs, clip_range)
        stats = self.scorer.stats(rollout, reference_states)
        return estimator.loss(stats, rollout.mask, weights, beta=beta, behaviour_logprobs=behaviour_logprobs)

    @torch.no_grad()
    def collect(self, batch: dict[str, Tensor], number: int) -> Experience:
        """Sample completions of the prompts, score them, and let the estimator weigh them as a whole.

        The whole is what all processes sampled; each keeps its own.

        Args:
            batch: Prompts.
            number: Which rollout of the run this is: the address of its draws.
        """
        seed, group_size = derive_seed(self.seed, "completions", number), self.sampling.completions_per_prompt
        with self.stopwatch("generate"):
            before = self.global_rank * len(batch["tokens"]) * group_size
            rollout = self.generate(self.policy, batch, self.sampling, seed, before, self.backend)
        with self.stopwatch("statistics"):
            reference_states = self.scorer.reference_states(rollout)
            stats = self.scorer.stats(rollout, reference_states)
        with self.stopwatch("reward"):
            rewards = self.rewards(rollout)
        unfinished = ~((rollout.completions == self.tokenizer.eos_token_id) & rollout.mask).any(1)
        weights, metrics = self._weigh(stats, rollout.mask, rewards, unfinished)
        rewards = self._trained_for(rewards, unfinished)
        return Experience(rollout, reference_states, stats.logprobs, rewards, weights, metrics)

    def _trained_for(self, rewards: Tensor, unfinished: Tensor) -> Tensor:
        return rewards - self.missing_eos_penalty * unfinished

    def _weigh(
        self, stats: TokenStats, mask: Tensor, rewards: Tensor, unfinished: Tensor
    ) -> tuple[LossWeights, dict[str, float]]:
        """Loss weights of this process's completions, and metrics, both from those of all processes."""
        group_size = self.sampling.completions_per_prompt
        count, width = mask.shape
        columns = rewards[:, None], unfinished[:, None]
        parts = gather([tensor.cpu() for tensor in (*stats, mask, *columns) if tensor is not None])
        *fields, mask, rewards, unfinished = (
            stacked(part).to(self.device) for part in zip(*parts, strict=True)
        )
        stats, rewards, unfinished = TokenStats(*fields), rewards[:, 0], unfinished[:, 0]
        trained_for = self._trained_for(rewards, unfinished)
        weights = self.kl_estimator.weights(stats, mask, trained_for, beta=self.beta, group_size=group_size)
        metrics: dict[str, float] = {}
        for name, values in (("reward", rewards), ("kl", RaoBlackwell().value(stats, mask))):
            mean, error = clustered_mean(values.view(-1, group_size))
            metrics |= {name: mean.item(), f"{name}_se": error.item()}
        metrics["length"] = mask.sum(1).float().mean().item()
        metrics["unfinished"] = unfinished.float().mean().item()
        first = self.global_rank * count
        return weights.map(lambda field: field[first : first + count, :width]), metrics

    def _share(self, experience: Experience, index: int) -> Experience:
        """The sequences of one of the equal parts a rollout is split into; no prompt's group is cut."""
        count = len(experience.rewards)
        groups = count // self.sampling.completions_per_prompt
        if groups % self._splits:
            raise ConfigurationError(
                f"{groups} prompts cannot be split evenly into mini_batches={self.mini_batches} × "
                f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches} parts",
                key="batch_size",
            )
        size = count // self._splits
        return experience.rows(slice(index * size, (index + 1) * size))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep every process's rollout in use: after a stop within its steps it could not be drawn again."""
        super().on_save_checkpoint(checkpoint)
        if self.experience is not None:
            # Plain tuples: a checkpoint holds no class that reading it would have to import.
            parts = [tuple(part) if isinstance(part, tuple) else part for part in self.experience]
            checkpoint[EXPERIENCE_KEY] = gather(parts)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the rollout in use from the checkpoint."""
        super().on_load_checkpoint(checkpoint)
        if EXPERIENCE_KEY in checkpoint:
            kept = checkpoint[EXPERIENCE_KEY]
            if self._trainer is not None and len(kept) != self.trainer.world_size:
                raise ConfigurationError(
                    f"ckpt_path: saved by {len(kept)} processes, and trainer.devices makes "
                    f"{self.trainer.world_size}; a run is resumed by as many as began it"
                )
            rollout, reference_states, behaviour_logprobs, rewards, weights, metrics = kept[self.global_rank]
            self.experience = Experience(
                Rollout(*(tensor.to(self.device) for tensor in rollout)),
                reference_states.to(self.device),
                behaviour_logprobs.to(self.device),
                rewards.to(self.device),
                LossWeights(*(tensor.to(self.device) for tensor in weights)),
                metrics,
            )
