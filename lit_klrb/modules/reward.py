"""Training of a reward model: a text classifier on labelled reviews."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.statistics import clustered_mean
from lit_klrb.models import loading
from lit_klrb.modules.base import TrainedModule
from lit_klrb.seeding import derive_seed, forked_rng

LABELS = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}


@final
@dataclass(kw_only=True, eq=False, repr=False)
class RewardModule(TrainedModule):
    """Maximum likelihood training of a classifier, from new weights or from a given classifier.

    Its checkpoint can be the `reward_path` of DPO and RLOO: the reward is the log odds of the label
    "positive".

    Args:
        classifier_config: Configuration of a model with new weights: `model_type` and the settings that
            differ from its defaults; vocabulary and special tokens are the tokenizer's. Give either this or
            classifier_path.
        classifier_path: The initial classifier: a hub id, an exported folder or a checkpoint.
        tokenizer_path: Tokenizer of a new model: "grammar", a hub id, a folder or a policy's checkpoint.

    Raises:
        ConfigurationError: If not exactly one of classifier_config and classifier_path is given.
    """

    role = loading.CLASSIFIER
    uses_dropout = True
    reads = ("labelled reviews", "labelled reviews")

    classifier_config: dict[str, Any] | None = None
    classifier_path: str | None = None
    tokenizer_path: str = loading.GRAMMAR

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier: PreTrainedModel
        loading.check_one_given(self.role, self.classifier_config, self.classifier_path)
        fixed = sorted({*LABELS, "num_labels"} & {*(self.classifier_config or ())})
        if fixed:
            raise ConfigurationError(
                f"{fixed[0]} is determined by the two labels of the data; leave it out",
                key="classifier_config",
            )
        self._evaluated: list[Tensor] = []

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The classifier of classifier_path, or a new one initialised from the seed."""
        if self.classifier_path is not None:
            source = "classifier_path", self.classifier_path, self.role
            return loading.load_model(*source), loading.load_tokenizer(*source)
        assert self.classifier_config is not None
        tokenizer = loading.load_tokenizer("tokenizer_path", self.tokenizer_path)
        config = {**LABELS, **self.classifier_config}
        return loading.fresh_model(config, tokenizer, self.seed, self.role), tokenizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the labels, in nats."""
        with forked_rng(derive_seed(self.seed, "dropout", batch_idx, self.global_rank), self.device):
            logits = self._logits(batch)
        loss = cross_entropy(logits, batch["labels"])
        accuracy = (logits.argmax(1) == batch["labels"]).float().mean()
        self.log_metrics("train", {"loss": loss.detach(), "accuracy": accuracy}, batch_size=len(logits))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Collect the cross-entropy of each text and whether its label is predicted; averaged at the end."""
        logits, labels = self._logits(batch), batch["labels"]
        nats = cross_entropy(logits, labels, reduction="none")
        self._evaluated.append(torch.stack([nats, (logits.argmax(1) == labels).float()]))

    def on_validation_epoch_end(self) -> None:
        """Log cross-entropy and accuracy with standard errors."""
        self._log_evaluation("val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Collect the cross-entropy of each test text and whether its label is predicted."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log cross-entropy and accuracy on the test split with standard errors."""
        self._log_evaluation("test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[dict[str, Any]]:
        """Each text with its label and the label's probability."""
        logprobs = self._logits(batch).log_softmax(1)
        texts = self.tokenizer.batch_decode(batch["tokens"], skip_special_tokens=True)
        labels = batch["labels"]
        probability = logprobs.gather(1, labels[:, None])[:, 0].exp()
        return [
            {"text": text, "label": label, "probability": value}
            for text, label, value in zip(texts, labels.tolist(), probability.tolist(), strict=True)
        ]

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].long()
        logits: Tensor = self.classifier(input_ids=batch["tokens"], attention_mask=mask).logits
        return logits.float()

    def _log_evaluation(self, stage: str) -> None:
        nats, correct = torch.cat(self._evaluated, 1)
        self._evaluated.clear()
        metrics: dict[str, float] = {}
        for name, values in (("loss", nats), ("accuracy", correct)):
            mean, error = clustered_mean(values[:, None])
            metrics |= {name: mean.item(), f"{name}_se": error.item()}
        self.log_evaluation(stage, metrics)
        self.print(
            f"step {self.global_step}: accuracy {metrics['accuracy']:.4f} ± {metrics['accuracy_se']:.4f}"
        )
