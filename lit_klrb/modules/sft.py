"""Supervised training of a language model, the reference of all later stages."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.modules import TextDataModule
from lit_klrb.data.tokenizer import train_bpe
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.models.heads import SplitModel, split_model
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules.policy import PolicyModule
from lit_klrb.rollouts.scoring import completion_logprobs
from lit_klrb.seeding import derive_seed, forked_rng


@final
@dataclass(kw_only=True, eq=False, repr=False)
class SFTModule(PolicyModule):
    """Maximum likelihood training on complete texts, from new weights or from a given policy.

    Args:
        policy_config: Configuration of a model with new weights: `model_type` and the settings that differ
            from its defaults; vocabulary and special tokens are the tokenizer's. Give either this or
            policy_path.
        tokenizer_path: Tokenizer of a new model: "grammar", a hub id, a folder or a checkpoint.
        vocab_size: Train a byte-level BPE tokenizer with this many tokens on the training texts instead.

    Raises:
        ConfigurationError: If not exactly one of policy_config and policy_path is given.
    """

    uses_dropout = True
    shards = True
    reads = ("texts", "texts")

    policy_config: dict[str, Any] | None = None
    tokenizer_path: str = loading.GRAMMAR
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        loading.check_one_given(loading.POLICY, self.policy_config, self.policy_path)
        if self.vocab_size is not None and self.tokenizer_path != loading.GRAMMAR:
            problem = (
                f"{self.vocab_size} trains a tokenizer, but tokenizer_path={self.tokenizer_path} names one"
            )
            raise ConfigurationError(f"{problem}: give only one of them", key="vocab_size")
        self._evaluated: list[Tensor] = []
        # Mean numbers of tokens in the batches of a step
        self._counts: list[Tensor] = []
        self.split: SplitModel | None = None

    def build_models(self) -> None:
        """Build the model, and split it so that its head can be applied tile by tile."""
        super().build_models()
        self.split = split_model(self.policy)

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The policy of policy_path, or a new one initialised from the seed."""
        if self.policy_path is not None:
            return loading.load("policy_path", self.policy_path)
        assert self.policy_config is not None
        tokenizer = self._new_tokenizer()
        return loading.fresh_model(self.policy_config, tokenizer, self.seed), tokenizer

    def _new_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.vocab_size is None:
            return loading.load_tokenizer("tokenizer_path", self.tokenizer_path)
        rows = self.corpus.rows.get("train") if self.corpus is not None else None
        if rows is None:
            problem = f"{self.vocab_size} trains a tokenizer, which needs fit and a data module of texts"
            remedy = "to evaluate, give the checkpoint with the trained tokenizer as ckpt_path"
            raise ConfigurationError(f"{problem}; {remedy}", key="vocab_size")
        return train_bpe((row.words for row in rows), self.vocab_size)

    @property
    def corpus(self) -> TextDataModule | None:
        """The trainer's data module, if it has texts."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        return data if isinstance(data, TextDataModule) else None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy over the tokens of the step's batches in all processes, in nats."""
        with forked_rng(derive_seed(self.seed, "dropout", batch_idx, self.global_rank), self.device):
            nats, count = self._cross_entropy(batch)
        # DDP averages gradients over processes, whose numbers of tokens differ: divide by the mean number
        mean = self.trainer.strategy.reduce(count.float(), reduce_op="mean")
        self.log_metrics("train", {"loss": nats.detach() / mean}, batch_size=int(count))
        # So do the batches whose gradients are accumulated: all are divided by the first one's number
        is_first = batch_idx % self.trainer.accumulate_grad_batches == 0
        self._counts = [mean] if is_first else [*self._counts, mean]
        return nats / self._counts[0]

    def on_after_backward(self) -> None:
        """After the last batch of a step: divide by the mean number of all."""
        if 1 < len(self._counts) == self.trainer.accumulate_grad_batches:
            scale = self._counts[0] / torch.stack(self._counts).mean()
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Sum the cross-entropy and count tokens; averaged at the end."""
        self._evaluated.append(torch.stack(self._cross_entropy(batch)))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[dict[str, Any]]:
        """Each text with its cross-entropy in nats per token."""
        nats, mask = self._token_nats(batch)
        texts = self.tokenizer.batch_decode(batch["tokens"], skip_special_tokens=True)
        means = (nats.sum(1) / mask.sum(1).clamp(min=1)).tolist()
        return [{"text": text, "nats_per_token": mean} for text, mean in zip(texts, means, strict=True)]

    def conclude_evaluation(self, stage: str) -> None:
        """Log the cross-entropy, and its excess over the entropy of the source if that is known."""
        nats, count = torch.stack(self._evaluated).sum(0)
        self._evaluated.clear()
        loss = nats / count
        metrics = {"loss": loss.item(), "perplexity": loss.exp().item()}
        if self.corpus is not None and (optimum := self.corpus.entropy_per_token()) is not None:
            metrics["excess"] = (loss / optimum - 1).item()
        self.log_evaluation(stage, metrics)

    def _cross_entropy(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        nats, mask = self._token_nats(batch)
        return nats.sum(), mask.sum()

    def _token_nats(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """−log p of each token given those before, shape [B, N−1], and the mask of those trained on."""
        mask = batch.get("mask", batch["attention_mask"])[:, 1:]
        texts = Rollout(batch["tokens"], batch["attention_mask"], mask)
        return -completion_logprobs(self.policy, texts, 1.0, self.split), mask
