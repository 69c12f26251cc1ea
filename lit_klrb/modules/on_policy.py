"""Training on completions that the policy samples itself, with a KL whose estimator is plugged in."""

import math
from abc import ABC
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_klrb.distributed import gather, own_rows
from lit_klrb.engine.generation import generate_completions
from lit_klrb.engine.vllm import VLLMBackend
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.estimators import EstimatorMemory, KLEstimator, LossWeights, NoKL
from lit_klrb.functional import TokenStats
from lit_klrb.models import loading
from lit_klrb.models.dtypes import computing_dtype
from lit_klrb.models.rollout import Rollout
from lit_klrb.models.sharding import of_first
from lit_klrb.modules.moving_reference import MovingReferenceModule
from lit_klrb.modules.rollout_metrics import rollout_means
from lit_klrb.rollouts.evaluation import Evaluation
from lit_klrb.rollouts.step import Experience, Scored, begin, handed_over, policy_loss, reward_to_come, weigh
from lit_klrb.run.lightning_internals import trainer_of
from lit_klrb.seeding import derive_seed

EXPERIENCE_KEY = "experience"


@dataclass(kw_only=True, eq=False, repr=False)
class OnPolicyModule(MovingReferenceModule, ABC):
    """Trains the policy with RLOO on completions that it samples itself.

    Each rollout is used for inner_epochs · mini_batches optimizer steps. Everything that couples sequences
    (the leave-one-out baseline, fitted coefficients) is computed once, on the whole rollout, by the estimator
    that `KLEstimatorCallback` (the keys under kl) plugs in, as an `EstimatorMemory`, together with beta.

    A subclass can change the units of rewards (`reward_scale`). With `uses_kl_estimator = False` it has a
    `policy_loss` of its own, of which the KL with the weight `self.beta` is a part; no estimator is used or
    recorded, and `experience.weights.score` is minus the advantage of each completion.

    Args:
        inner_epochs: Passes over each rollout. After the first step the completions are off-policy, see
            `off_policy` of the estimator.
        mini_batches: Optimizer steps per pass; must divide the number of prompts per batch.
        missing_eos_penalty: Subtracted in training from the reward of completions truncated at
            max_new_tokens, but not from the logged reward. `train/unfinished` is their proportion.
        rollout_backend: Samples the completions in training. vllm (the extra of that name) is for large
            models on GPUs; its samples are not reproducible bit for bit, and not from exactly the policy that
            is trained: `off_policy` of the estimator corrects that from the first step on, and
            `train/sampler_kl` estimates KL(vLLM‖policy) in nats per sequence.
        vllm_options: Arguments of `vllm.LLM`, such as {gpu_memory_utilization: 0.4}.
        prefix_reward_every: Compute the reward of the completion so far after its first token and after
            every such number of tokens: a baseline of the tokens that follow, without bias, by an estimator
            with the direction prefix_rewards. The reward is then called with unfinished completions,
            max_new_tokens / prefix_reward_every times as often; null for never.

    Reference: Prefix rewards are the potential of Ng, Harada, Russell (1999), "Policy invariance under reward
    transformations".
    """

    uses_kl_estimator = True
    shards = True
    reads = ("prompts", "prompts")
    # Whether the reward is part of the objective
    trains_on_reward: ClassVar[bool] = True

    inner_epochs: int = 1
    mini_batches: int = 1
    missing_eos_penalty: float = 0.0
    rollout_backend: Literal["transformers", "vllm"] = "transformers"
    vllm_options: dict[str, Any] | None = None
    prefix_reward_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Both set by the callback, the first only if the estimator is used
        self.memory: EstimatorMemory
        self.beta: float
        if not self.uses_kl_estimator:
            # Weights the completions by their rewards alone
            self.memory = EstimatorMemory(NoKL(allow_biased=True))
        finite = 0 <= self.missing_eos_penalty < math.inf
        if not finite or (self.missing_eos_penalty and not self.stop_at_eos):
            actual = f"{self.missing_eos_penalty} with stop_at_eos={self.stop_at_eos}"
            problem = f"must be finite and 0 or larger, and 0 unless stop_at_eos, got {actual}"
            raise ConfigurationError(problem, key="missing_eos_penalty")
        check_at_least(1, inner_epochs=self.inner_epochs, mini_batches=self.mini_batches)
        if self.prefix_reward_every is not None:
            check_at_least(1, prefix_reward_every=self.prefix_reward_every)
            if not (self.trains_on_reward and self.uses_kl_estimator):
                lacks = "KL estimator to read it" if self.trains_on_reward else "reward to train on"
                problem = f"{self.prefix_reward_every} has no effect: {type(self).__name__} has no {lacks}"
                raise ConfigurationError(problem, key="prefix_reward_every")
        if self.reference_path == loading.ITSELF and self.optimizer_steps > 1:
            steps = f"inner_epochs={self.inner_epochs} × mini_batches={self.mini_batches}"
            problem = (
                f"{self.reference_path} changes with each optimizer step, of which a rollout has {steps}"
            )
            raise ConfigurationError(f"{problem}; one is supported", key="reference_path")
        if self.group_size < 2:
            problem = f"must be at least 2 for the leave-one-out baseline, got {self.group_size}"
            raise ConfigurationError(problem, key="completions_per_prompt")
        if self.vllm_options is not None and self.rollout_backend != "vllm":
            raise ConfigurationError(f"{self.vllm_options} needs rollout_backend: vllm", key="vllm_options")
        vllm = self.rollout_backend == "vllm"
        self.backend = VLLMBackend(self.vllm_options) if vllm else generate_completions
        # That of the importance weights of the latest step, per completion; None without weights
        self.effective_share: Tensor | None = None
        # The current rollout, which checkpoints contain.
        self.experience: Experience | None = None
        self.has_said_equal = False

    def setup(self, stage: str) -> None:
        """Check that an estimator is plugged in and its gradient is not known to be biased."""
        super().setup(stage)
        if stage != "fit":
            return
        if not hasattr(self, "beta"):
            needs = "needs a KLEstimatorCallback among the trainer's callbacks"
            raise ConfigurationError(f"{type(self).__name__} {needs}")
        if not self.uses_kl_estimator and type(self).policy_loss is OnPolicyModule.policy_loss:
            needs = "needs a policy_loss of its own, as its uses_kl_estimator is False"
            raise ConfigurationError(f"{type(self).__name__} {needs}")
        self.memory.check_trainable(self.optimizer_steps)
        prompts = getattr(self.trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
        if prompts is not None:
            self._check_parts(prompts)
        if self.prefix_reward_every is not None and not self.kl_estimator.reads_prefix_rewards:
            problem = f"{self.prefix_reward_every} has no effect with {self.kl_estimator.label}"
            remedy = "RaoBlackwellControlVariate uses them"
            raise ConfigurationError(f"{problem}; {remedy}", key="model.init_args.prefix_reward_every")

    def configure_model(self) -> None:
        """Build the models; the estimator's memory begins with what the warm start hands over."""
        is_new = self.ckpt_path is None and not hasattr(self, "policy")
        super().configure_model()
        if not hasattr(self, "pair"):
            return
        if self.pair.note is not None and self.rollout_backend == "vllm":
            raise ConfigurationError(f"vllm draws from all rows: {self.pair.note}", key="rollout_backend")
        if hasattr(self, "memory"):
            warm_start = self.policy_path if is_new and self.trains_on_reward else None
            prior = of_first(partial(handed_over, self.memory, warm_start))
            begin(self.memory, self.pair.vocabulary_size, prior)

    def on_fit_start(self) -> None:
        """Start vLLM, before anything is spent on an evaluation."""
        super().on_fit_start()
        if isinstance(self.backend, VLLMBackend):
            self.backend.start(self.policy, computing_dtype(self.trainer.precision))

    @property
    def kl_estimator(self) -> KLEstimator:
        """The estimator in force."""
        return self.memory.estimator

    @property
    def group_size(self) -> int:
        """K, the number of completions per prompt."""
        return self.completions_per_prompt

    @property
    def parts(self) -> int:
        """Number of equal parts of a rollout, one per training step of a pass."""
        return self.mini_batches * self.trainer.accumulate_grad_batches

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.inner_epochs * self.mini_batches

    @property
    def steps_per_batch(self) -> int:
        """Number of training steps per rollout."""
        return self.inner_epochs * self.parts

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one step of gradient descent on beta KL(p || q) - E[r(x, y)].

        x is a prompt, y a completion, p the policy, q the reference. New completions are sampled every
        `steps_per_batch` steps; each of these steps uses one part of them.
        """
        number, step = divmod(batch_idx, self.steps_per_batch)
        stats = None
        if step == 0:
            rollout = self.sample(batch, number)  # y ~ p(. | x), K completions per prompt x
            token_values = self.memory.token_values  # a(v), from the rollouts before this one
            # log p, log q, KL_t and E_t[a] of every token, with a graph if the first step uses all of them
            read = token_values, self.kl_estimator.topk, self.kl_estimator.reads_jsd
            with torch.set_grad_enabled(self.parts == 1):
                states, stats = self.pair.score(rollout, batch, *read)
            rewards = self.pair.rewards(self.reward, rollout, batch)  # r(x, y)
            training_rewards = self.training_rewards(rollout, rewards)  # less a penalty if y does not end
            # r(x, y) - r(x, y_<t), if the setting asks for it
            stats = stats._replace(reward_to_come=self.reward_to_come(rollout, batch, training_rewards))
            # beta * credited KL - (r - mean of the other K - 1), on the completions of all processes
            weights = self.weigh(rollout, stats, training_rewards)
            metrics = self.rollout_metrics(rollout, stats.detach(), rewards)
            # log p of the policy that sampled y, by the engine that did
            logprobs = stats.logprobs.detach() if rollout.logprobs is None else rollout.logprobs
            fields = rollout, states, logprobs, training_rewards, weights, token_values, metrics
            self.experience = Experience(*fields)
        assert self.experience is not None
        # sum_t weights_t log p_t + kl_weights_t KL_t
        part = self.experience.part(step % self.parts, self.parts)
        loss = self.policy_loss(part, stats if self.parts == 1 else None)
        metrics = {**self.experience.metrics, "loss": loss.item()}
        if self.effective_share is not None:
            metrics["ess"] = self.effective_share.item()
        self.log_metrics("train", metrics, batch_size=len(batch["tokens"]))
        return loss

    def sample(self, batch: dict[str, Tensor], number: int) -> Rollout:
        """Sample completions of P prompts from the policy; the seed depends on the number of the rollout."""
        prompts = len(batch["tokens"])
        self._check_parts(prompts)
        return self.pair.sample(
            batch,
            self.sampling,
            seed=derive_seed(self.seed, "completions", number),
            rows_before=self.global_rank * prompts * self.group_size,
            backend=self.backend,
        )

    def _check_parts(self, prompts: int) -> None:
        if prompts % self.parts:
            accumulated = f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches}"
            problem = f"{prompts} prompts cannot be split evenly into mini_batches={self.mini_batches}"
            raise ConfigurationError(f"{problem} × {accumulated} parts", key="batch_size")

    def training_rewards(self, rollout: Rollout, rewards: Tensor) -> Tensor:
        """Rewards minus the penalty of completions without EOS, shape [B]; of 0 in distillation."""
        rewards = rewards if self.trains_on_reward else torch.zeros_like(rewards)
        return rewards - self.missing_eos_penalty * rollout.unfinished(self.pair.ends)

    def reward_to_come(self, rollout: Rollout, batch: dict[str, Tensor], rewards: Tensor) -> Tensor | None:
        """`TokenStats.reward_to_come` of a rollout, given its training rewards; None if not computed."""
        if self.prefix_reward_every is None:
            return None
        try:
            reward_of = partial(self.pair.rewards, self.reward, batch=batch)
            return reward_to_come(rollout, rewards, self.prefix_reward_every, reward_of)
        except Exception as error:
            key = "model.init_args.prefix_reward_every"
            error.add_note(f"{key} asked for the reward of an unfinished completion")
            raise

    def reward_scale(self, rewards: Tensor) -> Tensor:
        """What the training rewards of a rollout are multiplied by before they are weighted, shape [B].

        The KL's weight is not. B are the completions of all processes, prompt-major.
        """
        return torch.ones_like(rewards)

    def weigh(self, rollout: Rollout, stats: TokenStats, rewards: Tensor) -> LossWeights:
        """The estimator's weights of a rollout, which it remembers for the next ones."""
        scored = Scored.everyones(rollout, stats, rewards)
        settings: dict[str, Any] = {"group_size": self.group_size, "reward_scale": self.reward_scale}
        weights = weigh(self.memory, scored, beta=self.beta, **settings)
        return weights.map(lambda rows: own_rows(rows, like=rollout.mask))

    def policy_loss(self, experience: Experience, stats: TokenStats | None = None) -> Tensor:
        """The estimator's loss on some sequences, averaged over them.

        Statistics with a graph spare another forward pass of the policy, which they are None without; then
        `self.pair.scorer.stats(rollout, states)` makes it. For a mean over tokens in place of sequences, see
        `Experience.token_mean`.
        """
        rollout, states, behaviour, _, weights, token_values, _ = experience
        settings: dict[str, Any] = {"behaviour_logprobs": behaviour, "token_values": token_values}
        models = self.pair.scorer, self.kl_estimator
        settings |= {"beta": self.beta, "stats": stats}
        loss, self.effective_share = policy_loss(*models, rollout, states, weights, **settings)
        return loss

    def rollout_metrics(self, rollout: Rollout, stats: TokenStats, rewards: Tensor) -> dict[str, float]:
        """Means over the completions of all processes, with standard errors for reward and KL."""
        evaluation = Evaluation(rollout, stats, rewards, self.group_size)
        metrics = rollout_means(evaluation, self.kl_estimator, self.reward, self.pair.ends)
        if metrics.get("equal_rewards") == 1 and not self.has_said_equal:
            self.has_said_equal = True
            self.print(
                f"step {self.global_step}: all completions of each prompt have the same reward, such as "
                f"{rewards[0].item():g}: this rollout teaches nothing about the reward"
            )
        return metrics | self.memory.metrics

    @property
    def last_rollout(self) -> tuple[float, int]:
        """Mean KL (nats) and number of completions of the latest rollout, over all processes."""
        assert self.experience is not None
        return self.experience.metrics["kl"], len(self.experience.rewards) * self.trainer.world_size

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the rollouts of all processes, which cannot be sampled again once the policy has changed."""
        super().on_save_checkpoint(checkpoint)
        if self.experience is not None:
            checkpoint[EXPERIENCE_KEY] = gather(self.experience.state())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore this process's rollout, to resume training on it."""
        super().on_load_checkpoint(checkpoint)
        trainer, states = trainer_of(self), checkpoint.get(EXPERIENCE_KEY)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or states is None:
            return
        self.experience = Experience.of_processes(
            states, self.global_rank, self.trainer.world_size, self.device
        )
