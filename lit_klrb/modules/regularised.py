"""Base classes of DPO, RLOO and distillation: a frozen reference, a reward and the common evaluation."""

import logging
from abc import ABC
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb import schema
from lit_klrb.distributed import rank_slice
from lit_klrb.engine.generation import Sampling
from lit_klrb.engine.served import ServedTeacher
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.functional import TokenStats
from lit_klrb.functional.statistics import FEW_PROMPTS, clustered_mean
from lit_klrb.models import loading
from lit_klrb.models.dtypes import set_dtypes
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules.policy import PolicyModule
from lit_klrb.reward_functions import TrainerState
from lit_klrb.rewards import (
    Reward,
    RewardOutput,
    TrainingReward,
    classifiers_of,
    load_reward,
    no_reward,
    reward_parts,
)
from lit_klrb.rollouts.evaluation import Evaluation, is_evaluation, start_key
from lit_klrb.rollouts.pair import Loaded, Pair
from lit_klrb.run.cache import cached
from lit_klrb.run.lightning_internals import trainer_of
from lit_klrb.seeding import derive_seed

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class RegularisedModule(PolicyModule, ABC):
    """A policy that is regularised towards a frozen reference and evaluated on its own completions.

    The evaluation is the same for all subclasses, regardless of the training objective: new completions of
    the same prompts with the same seeds, their reward, and the Rao-Blackwell estimate of their KL to the
    reference.

    Args:
        reference_path: The frozen reference: a hub id, a folder, a .gguf file or a checkpoint. None means
            the policy with its adapter disabled, which takes no extra memory; "policy" the policy itself with
            a stopped gradient, which then needs prompts of its own (see teacher_system_prompt of the data).
        completions_per_prompt: Completions per training prompt.
        max_new_tokens: Maximum number of tokens of a completion.
        stop_at_eos: Whether the end-of-sequence tokens end a completion; if not, all have max_new_tokens.
        temperature: Divides the logits of both models, in sampling and in every log-probability.
        reward_path: The reward: "grammar" (the embedded world's exact log odds of a positive review), a
            classifier (a hub id, a folder or a checkpoint of RewardModule or PairwiseRewardModule), or
            "package.module:function", a function from a list of texts to a list of numbers, or from prompts,
            completions and other columns of the data as in TRL. A mapping gives a weighted sum:
            {"grammar": 1.0, "my_rewards:shortness": 0.1}. In distillation it is measured beside the KL and
            has no effect on training; null for none.
        reward_label: Rewarded label of a classifier; by default the second of two, the positive one. Several
            classifiers can each have their own: {path: label}.
        reward_output: Whether the reward is the log odds of that label or its logit.
        reward_retries: How often a reward function that gets no answer, such as from a judge (a time-out, no
            connection), is called again, after 5, 10, 20, ... seconds. `train/reward_retries` counts them.
        evaluation_completions: Completions per evaluation prompt.
        final_evaluation_completions: The same before the first step and after `trainer.max_steps`, by which
            runs are compared, and of the commands that evaluate: more have less noise; None for as many.
        evaluation_seed: Seed of the completions in evaluation; the same for runs to be compared.
    """

    reference_path: str | None = None
    completions_per_prompt: int = 2
    max_new_tokens: int = 48
    stop_at_eos: bool = True
    temperature: float = 1.0
    reward_path: str | dict[str, float] | None = None
    reward_label: str | dict[str, str] | None = None
    reward_output: RewardOutput = "log_odds"
    reward_retries: int = 3
    evaluation_completions: int = 2
    final_evaluation_completions: int | None = None
    evaluation_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reference: PreTrainedModel
        # Policy and reference, once they are loaded, and with the reference of the start if that moves
        self.pair: Pair
        self.first_pair: Pair | None = None
        self.reward: Reward
        if self.reward_path is not None:
            reward_parts(self.reward_path, self.reward_label)
        check_at_least(1, evaluation_completions=self.evaluation_completions)
        check_at_least(0, reward_retries=self.reward_retries)
        if self.final_evaluation_completions is not None:
            check_at_least(1, final_evaluation_completions=self.final_evaluation_completions)
        self.sampling = Sampling(self.completions_per_prompt, self.max_new_tokens, self.temperature)
        self._evaluated: list[dict[str, Tensor]] = []
        self._warned_of_few = False
        self._sampled = False
        # Whether the reference reads other prompts than the policy.
        self._own_context = False
        # Reward, KL and length of each prompt of the latest evaluation: means over its completions, [P] each.
        self.prompt_means: dict[str, Tensor] = {}

    @property
    def evaluation_sampling(self) -> Sampling:
        """How completions are sampled in an evaluation at the present step, or of a finished policy."""
        trainer, count = trainer_of(self), self.evaluation_completions
        if trainer is not None and not trainer.predicting:
            between = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
            # A run's gain is the end minus the start, whose noise counts as much
            if not between or 0 < trainer.max_steps <= self.global_step:
                count = self.final_evaluation_completions or count
        return Sampling(count, self.max_new_tokens, self.temperature)

    def build_models(self) -> None:
        """Build the policy, and load the reference."""
        super().build_models()
        self.pair = self.load_pair()

    def configure_model(self) -> None:
        """Build the models, and load the reward, which every process has as a whole."""
        trainer, is_new = trainer_of(self), not hasattr(self, "pair")
        super().configure_model()
        if trainer is None or not is_new:
            return
        reward = self.load_reward(trainer.strategy.root_device)
        is_none = reward is no_reward
        self.reward = reward if is_none else TrainingReward(reward, self._training_state, self.reward_retries)
        for model in classifiers_of(reward):
            set_dtypes(model, trainer.precision)
        if self.pair.note is not None:
            self.print(self.pair.note)
        if not self.pair.scorer.tiled and not self.pair.served:
            self.print(
                "policy or reference does not consist of a backbone and a linear head: full logits of both "
                "are computed"
            )

    def _training_state(self) -> tuple[TrainerState, bool]:
        """What rewards may read, and whether completions are those of training."""
        trainer = trainer_of(self)
        if trainer is None:
            return TrainerState(0, 0), False
        return TrainerState(self.global_step, trainer.max_steps), trainer.training

    def models(self) -> dict[str, PreTrainedModel]:
        """The policy, the reference and classifiers of the reward."""
        rewards = classifiers_of(self.reward) if hasattr(self, "reward") else []
        names = (
            ["reward"] if len(rewards) == 1 else [f"reward {number + 1}" for number in range(len(rewards))]
        )
        return super().models() | dict(zip(names, rewards, strict=True))

    def load_pair(self) -> Pair:
        """The policy, and its reference of reference_path."""
        second, path = None, self.reference_path
        if path is not None and path != loading.ITSELF:
            second = Loaded.of("reference_path", path)
            self.reference = loading.freeze(second.model)
        return self.pair_with(second)

    def pair_with(
        self,
        reference: Loaded | None,
        teacher: ServedTeacher | None = None,
        by_teacher: Mapping[str, Pair] | None = None,
    ) -> Pair:
        """The policy and a reference, or several, with the settings of the module."""
        return Pair(
            Loaded("policy_path", str(self.policy_path), self.policy, self.tokenizer),
            reference,
            temperature=self.temperature,
            itself=self.reference_path == loading.ITSELF,
            stop_at_eos=self.stop_at_eos,
            teacher=teacher,
            by_teacher=by_teacher or {},
        )

    def load_reward(self, device: torch.device) -> Reward:
        """Load the reward given by `reward_path` on a device; without one, zero for every text."""
        if self.reward_path is None:
            return no_reward
        return load_reward(self.reward_path, self.reward_label, self.reward_output, device)

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The policy of policy_path, or the reference if that is None."""
        key, path = "policy_path", self.reference_path if self.policy_path is None else self.policy_path
        if path is None or (self.policy_path is None and path == loading.ITSELF):
            raise ConfigurationError(f"must not be None if reference_path is {path}", key=key)
        return loading.load(key, path)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Evaluation]:
        """The common evaluation on a batch of prompts; callbacks receive the completions."""
        evaluation = self._evaluate(batch, batch_idx)
        self._evaluated.append(evaluation.summary())
        return {"evaluation": evaluation}

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[dict[str, Any]]:
        """Prompt and completion, with the reward if there is one, the KL in nats and the length in tokens."""
        evaluation = self._evaluate(batch, batch_idx)
        texts = self.pair.columns(evaluation.rollout, batch)
        columns = {
            "prompt": texts["prompts"],
            "completion": [c if isinstance(c, str) else c[-1]["content"] for c in texts["completions"]],
            **{name: values.flatten().tolist() for name, values in evaluation.summary().items()},
        }
        columns["length"] = list(map(int, columns["length"]))
        if self.reward is no_reward:
            del columns["reward"]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @torch.no_grad()
    def _evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> Evaluation:
        seed = derive_seed(self.evaluation_seed, "evaluation", batch_idx)
        pair, sampling = self.evaluated_pair, self.evaluation_sampling
        count = sampling.completions_per_prompt
        part, prompts = rank_slice(len(batch["tokens"]))
        own = {name: rows[part] for name, rows in batch.items()}
        drawn = {"seed": seed, "rows_before": part.start * count}

        def compute() -> list[Any]:
            self._sampled = True
            rollout = pair.sample(own, sampling, **drawn)
            return [tuple(rollout), tuple(pair.score(rollout, own)[1])]

        trainer = trainer_of(self)
        if trainer is not None and trainer.sanity_checking and self._start is not None:
            prompts_read = {name: rows.tolist() for name, rows in own.items() if isinstance(rows, Tensor)}
            key = {**self._start, **drawn, "sampling": asdict(sampling), "prompts": prompts_read}
            sampled, scored = cached(
                "evaluation", key, compute, lambda stored: is_evaluation(stored, len(own["tokens"]) * count)
            )
        else:
            sampled, scored = compute()
        rollout, stats = Rollout(*sampled), TokenStats(*scored)
        self._own_context = "teacher_tokens" in batch
        rewards = pair.rewards(self.reward, rollout, own)
        current = None if pair is self.pair else self.pair.score(rollout, own)[1]
        return Evaluation(rollout, stats, rewards, count, current).everyones(prompts)

    @property
    def evaluated_pair(self) -> Pair:
        """The pair whose KL the common evaluation estimates: the reference is that of the start."""
        return self.first_pair or self.pair

    @cached_property
    def _start(self) -> dict[str, Any] | None:
        """What the evaluation before the first step depends on; None if nothing of it is kept."""
        return start_key(self.evaluated_pair, self.device, self.trainer.precision)

    def evaluated_parts(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns of some of the evaluated prompts, by names of their own, shape [some of P, K] each."""
        return {}

    def conclude_evaluation(self, stage: str) -> None:
        """Log means with standard errors clustered by prompt."""
        vars(self).pop("_start", None)
        metrics: dict[str, float] = {}
        columns = {name: torch.cat([part[name] for part in self._evaluated]) for name in self._evaluated[0]}
        for name, values in (columns | self.evaluated_parts(columns)).items():
            mean, error = clustered_mean(values)
            metrics |= {name: mean.item(), f"{name}_se": error.item()}
        self.prompt_means = {name: values.mean(1) for name, values in columns.items()}
        self._evaluated.clear()
        count = len(self.prompt_means[schema.KL])
        prompts = "1 prompt" if count == 1 else f"{count} prompts"
        if count < FEW_PROMPTS and not self._warned_of_few:
            self._warned_of_few = True
            remedy = f"raise data.eval_size, or put at least {FEW_PROMPTS} into validation.jsonl, beside"
            log.warning(
                f"the evaluation has {prompts}, too few for standard errors: {remedy} train.jsonl in the "
                "folder that is data.source"
            )
        self.log_evaluation(stage, metrics)
        other = "policy" if self.reference_path == loading.ITSELF else "reference"
        context, served = " with its own context" if self._own_context else "", self.pair.served
        head = f", from the teacher's {served[0].k} likeliest tokens" if served else ""
        kept = "" if self._sampled else "; completions of an earlier run's, from the cache"
        self._sampled = False
        reward, kl = f"{metrics['reward']:.3f}", f"{metrics['kl']:.4f}"
        if count > 1:
            reward, kl = f"{reward} ± {metrics['reward_se']:.3f}", f"{kl} ± {metrics['kl_se']:.4f}"
            prompts = f"± standard error, {prompts}"
        moved = f", {metrics['kl_current']:.4f} to the current one" if self.first_pair else ""
        self.print(
            f"step {self.evaluated_step}: reward {reward}, KL(policy‖{other}{context}) {kl} nats per "
            f"sequence{moved} ({prompts}{head}{kept})"
        )
