"""What DPO, RLOO and distillation share: a frozen reference, a reward, and the common evaluation."""

from abc import ABC
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_klrb import models
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwell
from lit_klrb.functional.statistics import clustered_mean
from lit_klrb.generation import Rollout, Sampling, generate_completions
from lit_klrb.modules.base import PolicyModule
from lit_klrb.rewards import load_reward
from lit_klrb.scoring import Scorer
from lit_klrb.seeding import derive_seed


class Evaluated(NamedTuple):
    """One batch of the common evaluation, each [P, K]: reward, Rao-Blackwellized KL in nats, tokens."""

    reward: Tensor
    kl: Tensor
    length: Tensor


class LeashedModule(PolicyModule, ABC):
    """A policy kept near a frozen reference, and scored on completions that it samples itself.

    Every module here is validated and tested in the same way, whatever it trains with: fresh completions of
    the same prompts from the same seeds, their reward, and their KL by the Rao-Blackwell estimate.

    Args:
        reference_path: The frozen reference: a hub id, an exported folder or a checkpoint.
        reward_path: The reward: "grammar" (the embedded world's exact log odds of a positive review) or
            "package.module:function", from a list of texts to a list of numbers.
        completions_per_prompt: Completions of each training prompt.
        max_new_tokens: Tokens after which a completion is cut off.
        temperature: Divides both models' logits, in sampling and in every log-probability.
        evaluation_completions: Completions of each evaluation prompt.
        evaluation_seed: Decides the completions drawn in evaluation; the same for runs to be compared.
        kwargs: See `PolicyModule`.
    """

    reference: PreTrainedModel

    def __init__(
        self,
        *,
        reference_path: str,
        reward_path: str = models.GRAMMAR,
        completions_per_prompt: int = 2,
        max_new_tokens: int = 48,
        temperature: float = 1.0,
        evaluation_completions: int = 2,
        evaluation_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.reference_path, self.reward_path = reference_path, reward_path
        if evaluation_completions < 1:
            raise ConfigurationError(
                f"model.init_args.evaluation_completions must be at least 1, got {evaluation_completions}"
            )
        self.sampling = Sampling(completions_per_prompt, max_new_tokens, temperature)
        self.evaluation_sampling = Sampling(evaluation_completions, max_new_tokens, temperature)
        self.evaluation_seed = evaluation_seed
        self._evaluated: list[Evaluated] = []

    def configure_model(self) -> None:
        """Load reference and reward beside the policy; policy and reference must read the same tokens."""
        super().configure_model()
        if self._trainer is None or hasattr(self, "reference"):
            return
        self.reference = models.freeze(
            models.load_model("model.init_args.reference_path", self.reference_path)
        )
        sizes = [model.get_output_embeddings().weight.shape[0] for model in (self.policy, self.reference)]
        if sizes[0] != sizes[1]:
            raise ConfigurationError(
                f"model.init_args.reference_path: {self.reference_path} has a vocabulary of {sizes[1]}, "
                f"the policy one of {sizes[0]}; a KL between them needs one vocabulary"
            )
        self.reward = load_reward(self.reward_path)
        self.scorer = Scorer(self.policy, self.reference, self.sampling.temperature)
        if not self.scorer.tiled:
            self.print(
                "policy or reference is not a backbone with a linear head: both are read through logits"
            )

    def build_policy(self) -> None:
        """Set `policy` and `tokenizer`: those of policy_path, or the reference's."""
        policy_path = self.policy_path or self.reference_path
        self.tokenizer = models.load_tokenizer("model.init_args.policy_path", policy_path)
        self.policy = models.load_model("model.init_args.policy_path", policy_path)

    def generate(
        self, model: PreTrainedModel, batch: dict[str, Tensor], sampling: Sampling, seed: int
    ) -> Rollout:
        """Completions of a batch of prompts by policy or reference."""
        return generate_completions(
            model,
            batch["tokens"],
            batch["attention_mask"],
            sampling,
            seed=seed,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def texts(self, rollout: Rollout) -> list[str]:
        """Prompt and completion of each sequence as one text."""
        kept = rollout.tokens.masked_fill(~rollout.attention_mask, self.tokenizer.pad_token_id)
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)

    def rewards(self, rollout: Rollout) -> Tensor:
        """The reward of each sequence, [B]."""
        return self.reward(self.texts(rollout)).to(rollout.tokens.device)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The common evaluation of one batch of prompts."""
        self._evaluated.append(self._evaluate(batch, batch_idx)[1])

    def on_validation_epoch_end(self) -> None:
        """Log means with standard errors clustered by prompt."""
        self._log_evaluation("val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """As in validation, on the test prompts."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """As in validation."""
        self._log_evaluation("test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[dict[str, Any]]:
        """Each completion as text, with what the evaluation measures of it."""
        rollout, evaluated = self._evaluate(batch, batch_idx)
        columns = {
            "text": self.texts(rollout),
            **{k: v.flatten().tolist() for k, v in evaluated._asdict().items()},
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> tuple[Rollout, Evaluated]:
        seed = derive_seed(self.evaluation_seed, "evaluation", batch_idx)
        rollout = self.generate(self.policy, batch, self.evaluation_sampling, seed)
        stats = self.scorer.stats(rollout, self.scorer.reference_states(rollout))
        kl = RaoBlackwell().value(stats, rollout.mask)
        per_sequence = (self.rewards(rollout), kl, rollout.mask.sum(1).float())
        count = self.evaluation_sampling.completions_per_prompt
        return rollout, Evaluated(*(values.view(-1, count) for values in per_sequence))

    def _log_evaluation(self, stage: str) -> None:
        pooled = Evaluated(*(torch.cat(parts) for parts in zip(*self._evaluated, strict=True)))
        self._evaluated.clear()
        metrics: dict[str, float] = {}
        for name, values in pooled._asdict().items():
            mean, error = clustered_mean(values)
            metrics |= {name: mean.item(), f"{name}_se": error.item()}
        self.log_evaluation(stage, metrics)
        self.print(
            f"step {self.global_step}: reward {metrics['reward']:.3f} ± {metrics['reward_se']:.3f}, "
            f"KL(policy‖reference) {metrics['kl']:.4f} ± {metrics['kl_se']:.4f} nats a sequence"
        )
