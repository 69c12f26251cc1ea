"""Base classes of DPO, RLOO and distillation: a frozen reference, a reward and the common evaluation."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb import schema
from lit_klrb.data.chat import as_messages, is_messages
from lit_klrb.data.corpora import PROMPT
from lit_klrb.data.encoding import end_tokens
from lit_klrb.errors import ConfigurationError, check_at_least
from lit_klrb.estimators import RaoBlackwell, RaoBlackwellTopK
from lit_klrb.functional import TokenStats, TopK
from lit_klrb.functional.statistics import FEW_PROMPTS, clustered_mean
from lit_klrb.models import loading
from lit_klrb.models.adapters import adapter_off, has_adapter
from lit_klrb.models.generation import Rollout, Sampling, generate_completions
from lit_klrb.models.scoring import Scorer
from lit_klrb.models.served import ServedTeacher
from lit_klrb.modules.base import PolicyModule
from lit_klrb.modules.stopwatch import Stopwatch
from lit_klrb.reward_functions import IDS, TrainerState
from lit_klrb.rewards import NoReward, Reward, RewardOutput, TrainingReward, load_reward
from lit_klrb.run.lightning_internals import trainer_of
from lit_klrb.seeding import derive_seed

log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """Completions with their statistics and rewards.

    Args:
        rollout: K completions of each of P prompts, prompt-major.
        stats: Their token statistics under policy and reference, shape [P·K, T].
        rewards: Their rewards, shape [P·K].
        completions_per_prompt: K.
    """

    rollout: Rollout
    stats: TokenStats
    rewards: Tensor
    completions_per_prompt: int

    def summary(self) -> dict[str, Tensor]:
        """Reward, Rao-Blackwell estimate of the KL (nats) and length (tokens) of each completion, [P, K].

        From a served teacher, which sends no more than its head, the KL is that of `RaoBlackwellTopK`.
        """
        mask = self.rollout.mask
        estimator = RaoBlackwellTopK() if self.stats.kl is None else RaoBlackwell()
        columns = {
            "reward": self.rewards,
            "kl": estimator.value(self.stats, mask),
            "length": mask.sum(1),
        }
        return {name: v.float().view(-1, self.completions_per_prompt) for name, v in columns.items()}


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
        evaluation_completions: Completions per evaluation prompt.
        final_evaluation_completions: The same after `trainer.max_steps`, where runs are compared, and of the
            commands that evaluate: more have less noise; None for as many as before.
        evaluation_seed: Seed of the completions in evaluation; the same for runs to be compared.
    """

    reference_path: str | None = None
    completions_per_prompt: int = 2
    max_new_tokens: int = 48
    stop_at_eos: bool = True
    temperature: float = 1.0
    evaluation_completions: int = 2
    final_evaluation_completions: int | None = None
    evaluation_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reference: PreTrainedModel
        self.scorer: Scorer
        # In place of the reference, if that is an engine of its own
        self.teacher: ServedTeacher | None = None
        self.reward: Reward
        check_at_least(1, evaluation_completions=self.evaluation_completions)
        if self.final_evaluation_completions is not None:
            check_at_least(1, final_evaluation_completions=self.final_evaluation_completions)
        self.sampling = Sampling(self.completions_per_prompt, self.max_new_tokens, self.temperature)
        self.stopwatch = Stopwatch(running=False)
        # What ends the reference's completions, its tokenizer's EOS first; empty if it is the policy
        self.reference_ends: tuple[int, ...] = ()
        self._evaluated: list[dict[str, Tensor]] = []
        self._warned_of_few = False
        # Whether the reference reads other prompts than the policy.
        self._own_context = False
        # Reward, KL and length of each prompt of the latest evaluation: means over its completions, [P] each.
        self.prompt_means: dict[str, Tensor] = {}

    @property
    def evaluation_sampling(self) -> Sampling:
        """How completions are sampled in an evaluation at the present step, or of a finished policy."""
        trainer, count = trainer_of(self), self.evaluation_completions
        if trainer is not None and not trainer.predicting:
            training = trainer.state.fn == TrainerFn.FITTING
            if not training or 0 < trainer.max_steps <= self.global_step:
                count = self.final_evaluation_completions or count
        return Sampling(count, self.max_new_tokens, self.temperature)

    @abstractmethod
    def load_reward(self, device: torch.device) -> Reward:
        """Load the reward of complete texts on a device."""

    def configure_model(self) -> None:
        """Build the policy, and load reference and reward."""
        super().configure_model()
        trainer = trainer_of(self)
        if trainer is None or hasattr(self, "scorer"):
            return
        self._load_others(trainer.strategy.root_device)
        self.shard(self.policy, *([self.reference] if hasattr(self, "reference") else []))
        if not self.scorer.tiled and self.teacher is None:
            self.print(
                "policy or reference does not consist of a backbone and a linear head: full logits of both "
                "are computed"
            )

    def load_models(self, device: torch.device) -> None:
        """Load policy, reference and reward without a trainer, for measurements.

        Args:
            device: Where to put them.
        """
        self.policy, self.tokenizer = self.build()
        self._load_others(device)
        self.to(device)

    def _load_others(self, device: torch.device) -> None:
        if self.reference_path not in (None, loading.ITSELF):
            self.load_reference(str(self.reference_path))
        elif self.reference_path is None and not has_adapter(self.policy):
            raise ConfigurationError(
                "None means the policy with its adapter disabled, but the policy has no adapter; name the "
                "reference, or train an adapter (lora)",
                key="reference_path",
            )
        reward = self.load_reward(device)
        self.reward = reward if isinstance(reward, NoReward) else TrainingReward(reward, self._training_state)
        reference = getattr(self, "reference", self.policy)
        self.scorer = Scorer(self.policy, reference, self.temperature, self.reading_reference, self.teacher)

    def _training_state(self) -> tuple[TrainerState, bool]:
        """What rewards may read, and whether completions are those of training."""
        trainer = trainer_of(self)
        last = 0 if trainer is None else trainer.max_steps
        return TrainerState(
            self.global_step if trainer else 0, last
        ), trainer is not None and trainer.training

    def load_reference(self, path: str) -> None:
        """Load the reference from a path that names one.

        Raises:
            ConfigurationError: If its vocabulary is not the policy's, or loading fails.
        """
        self.reference = loading.freeze(loading.load_model("reference_path", path))
        sizes = (model.get_output_embeddings().weight.shape[0] for model in (self.policy, self.reference))
        loading.check_same_size("reference_path", path, *sizes)
        tokenizer = loading.load_tokenizer("reference_path", path)
        words = [one.get_vocab() for one in (self.tokenizer, tokenizer)]
        loading.check_same_vocabulary("reference_path", path, *words)
        self.reference_ends = end_tokens(tokenizer, self.reference)

    def load_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load policy and tokenizer from `policy_path`, or from `reference_path` if it is None.

        Raises:
            ConfigurationError: If neither names a model, or loading fails.
        """
        key, path = "policy_path", self.reference_path if self.policy_path is None else self.policy_path
        if path is None or (self.policy_path is None and path == loading.ITSELF):
            raise ConfigurationError(f"must not be None if reference_path is {path}", key=key)
        return loading.load_model(key, path), loading.load_tokenizer(key, path)

    def reading_reference(self) -> AbstractContextManager[PreTrainedModel]:
        """A context manager that yields the reference: a model, or the policy with its adapter disabled."""
        if self.reference_path is None:
            return adapter_off(self.policy)
        return nullcontext(getattr(self, "reference", self.policy))

    def as_read(self, rollout: Rollout, batch: Mapping[str, Any]) -> Rollout:
        """A rollout as the reference reads it: after its own prompts, if the batch has them.

        Args:
            rollout: K completions of each of P prompts, prompt-major.
            batch: The prompts.

        Raises:
            ConfigurationError: If the policy is its own reference and reads the same prompts.
        """
        if "teacher_tokens" in batch:
            return rollout.after(batch["teacher_tokens"], batch["teacher_attention_mask"])
        if self.reference_path == loading.ITSELF:
            raise ConfigurationError(
                "policy has a KL of 0 to the policy on the same prompts: give the teacher its own by "
                "data.teacher_system_prompt or the column teacher_prompt; a folder of that name is ./policy",
                key="reference_path",
            )
        return rollout

    def generate(
        self,
        model: PreTrainedModel,
        batch: dict[str, Tensor],
        sampling: Sampling,
        *,
        seed: int,
        rows_before: int = 0,
        backend: Callable[..., Rollout] = generate_completions,
    ) -> Rollout:
        """Sample completions of a batch of prompts from policy or reference, see `generate_completions`."""
        with self.stopwatch("generate"):
            return backend(
                model,
                batch["tokens"],
                batch["attention_mask"],
                sampling,
                seed=seed,
                ends=self.ends if self.stop_at_eos else (),
                pad_token_id=self.tokenizer.pad_token_id,
                rows_before=rows_before,
            )

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a completion."""
        return end_tokens(self.tokenizer, self.policy)

    def score(
        self,
        rollout: Rollout,
        batch: Mapping[str, Any],
        token_values: Tensor | None = None,
        topk: TopK | None = None,
    ) -> tuple[Tensor, TokenStats]:
        """The reference's hidden states, shape [B, T, D], and the token statistics, [B, T].

        Args:
            rollout: K completions of each of P prompts, prompt-major.
            batch: The prompts, and those that the reference reads.
            token_values: See `Scorer.stats`.
            topk: See `Scorer.stats`.
        """
        with self.stopwatch("statistics"):
            reference_states = self.scorer.reference_states(self.as_read(rollout, batch))
            return reference_states, self.scorer.stats(rollout, reference_states, token_values, topk)

    def texts(self, rollout: Rollout) -> list[str]:
        """Prompt and completion of each sequence as one text."""
        # Replace tokens after the end, which need not be padding tokens
        tokens = rollout.tokens.masked_fill(~rollout.attention_mask, self.tokenizer.pad_token_id)
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def rewards(self, rollout: Rollout, batch: Mapping[str, Any]) -> Tensor:
        """The reward of each sequence, shape [B].

        Args:
            rollout: K completions of each of P prompts, prompt-major.
            batch: The prompts; its `rows`, if it has them, are P mappings of other columns of the data.
        """
        with self.stopwatch("reward"):
            columns = self.reward_columns(rollout, batch.get("rows", ()))
            pairs = zip(rollout.completions, rollout.mask, strict=True)
            columns[IDS] = [tokens[mask].tolist() for tokens, mask in pairs]
            return self.reward(self.texts(rollout), columns).to(rollout.tokens.device)

    def reward_columns(self, rollout: Rollout, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """What functions of completions read: prompts and completions, and the columns of the rows.

        Prompts and completions are texts; those of conversations are lists of messages, as in TRL.

        Args:
            rollout: K completions of each of P prompts, prompt-major.
            rows: Other columns of the P prompts, each entry repeated K times; may be empty.
        """
        width = rollout.mask.shape[1]
        tokens = rollout.tokens.masked_fill(~rollout.attention_mask, self.tokenizer.pad_token_id)
        parts = {"prompts": tokens[:, :-width], "completions": tokens[:, -width:]}
        decoded = {
            name: self.tokenizer.batch_decode(part, skip_special_tokens=True) for name, part in parts.items()
        }
        repeats = len(tokens) // max(len(rows), 1)
        columns = {
            name: [row.get(name) for row in rows for _ in range(repeats)]
            for name in dict.fromkeys(name for row in rows for name in row)
        }
        conversations: Any = columns.get(PROMPT, ())
        if all(map(is_messages, conversations or [None])):
            del columns[PROMPT]
            return columns | as_messages(conversations, decoded["completions"])
        return columns | decoded

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Evaluation]:
        """The common evaluation on a batch of prompts; callbacks receive the completions."""
        evaluation = self._evaluate(batch, batch_idx)
        self._evaluated.append(evaluation.summary())
        return {"evaluation": evaluation}

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[dict[str, Any]]:
        """Prompt and completion, with the reward if there is one, the KL in nats and the length in tokens."""
        evaluation = self._evaluate(batch, batch_idx)
        texts = self.reward_columns(evaluation.rollout, batch.get("rows", ()))
        columns = {
            "prompt": texts["prompts"],
            "completion": [c if isinstance(c, str) else c[-1]["content"] for c in texts["completions"]],
            **{name: values.flatten().tolist() for name, values in evaluation.summary().items()},
        }
        columns["length"] = list(map(int, columns["length"]))
        if isinstance(self.reward, NoReward):
            del columns["reward"]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @torch.no_grad()
    def _evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> Evaluation:
        seed = derive_seed(self.evaluation_seed, "evaluation", batch_idx)
        rollout = self.generate(self.policy, batch, self.evaluation_sampling, seed=seed)
        _, stats = self.score(rollout, batch)
        self._own_context = "teacher_tokens" in batch
        return Evaluation(
            rollout, stats, self.rewards(rollout, batch), self.evaluation_sampling.completions_per_prompt
        )

    def conclude_evaluation(self, stage: str) -> None:
        """Log means with standard errors clustered by prompt."""
        metrics: dict[str, float] = {}
        for name in self._evaluated[0]:
            values = torch.cat([part[name] for part in self._evaluated])
            mean, error = clustered_mean(values)
            metrics |= {name: mean.item(), f"{name}_se": error.item()}
            self.prompt_means[name] = values.mean(1)
        self._evaluated.clear()
        prompts = len(self.prompt_means[schema.KL])
        if prompts < FEW_PROMPTS and not self._warned_of_few:
            self._warned_of_few = True
            log.warning(
                "the evaluation has %d prompts, too few for its standard errors: raise data.eval_size, or "
                "put at least %d into validation.jsonl, beside train.jsonl in the folder that is data.source",
                *(prompts, FEW_PROMPTS),
            )
        self.log_evaluation(stage, metrics)
        other = "policy" if self.reference_path == loading.ITSELF else "reference"
        context = " with its own context" if self._own_context else ""
        head = "" if self.teacher is None else f", from the teacher's {self.teacher.k} likeliest tokens"
        self.print(
            f"step {self.evaluated_step}: reward {metrics['reward']:.3f} ± {metrics['reward_se']:.3f}, "
            f"KL(policy‖{other}{context}) {metrics['kl']:.4f} ± {metrics['kl_se']:.4f} nats per sequence "
            f"(± standard error, {prompts} prompts{head})"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class RewardedModule(RegularisedModule, ABC):
    """A regularised policy that is trained with a reward of complete texts.

    Args:
        reward_path: The reward: "grammar" (the embedded world's exact log odds of a positive review), a
            classifier (a hub id, a folder or a checkpoint of RewardModule or PairwiseRewardModule), or
            "package.module:function", a function from a list of texts to a list of numbers, or from prompts,
            completions and other columns of the data as in TRL. A mapping gives a weighted sum:
            {"grammar": 1.0, "my_rewards:shortness": 0.1}.
        reward_label: Rewarded label of a classifier; by default the second of two, the positive one. Several
            classifiers can each have their own: {path: label}.
        reward_output: Whether the reward is the log odds of that label or its logit.
    """

    reward_path: str | dict[str, float] = loading.GRAMMAR
    reward_label: str | dict[str, str] | None = None
    reward_output: RewardOutput = "log_odds"

    def load_reward(self, device: torch.device) -> Reward:
        """Load the reward given by `reward_path`."""
        return load_reward(self.reward_path, self.reward_label, self.reward_output, device)
