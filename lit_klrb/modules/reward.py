"""Training of reward models: text classifiers on labelled texts or on preferences."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.preference import preference_loss
from lit_klrb.functional.statistics import clustered_mean
from lit_klrb.models import loading
from lit_klrb.models.backbones import classifier_on
from lit_klrb.modules.base import TrainedModule
from lit_klrb.rewards import label_scores
from lit_klrb.seeding import derive_seed, forked_rng


@dataclass(kw_only=True, eq=False, repr=False)
class ClassifierModule(TrainedModule, ABC):
    """Trains a classifier whose checkpoint can be the `reward_path` of DPO and RLOO.

    Args:
        classifier_config: Configuration of a model with new weights: `model_type` and the settings that
            differ from its defaults; vocabulary and special tokens are the tokenizer's. With backbone_path,
            the settings that differ from the given model's, such as its dropout.
        classifier_path: The initial classifier: a hub id, an exported folder or a checkpoint.
        backbone_path: A language model or an encoder whose head is replaced by a new one: a hub id, a
            folder, a .gguf file or a policy's checkpoint.
        tokenizer_path: Tokenizer of a new model: "grammar", a hub id, a folder or a policy's checkpoint.

    Raises:
        ConfigurationError: If not exactly one of a configuration, a classifier and a backbone is given.
    """

    role = loading.CLASSIFIER
    uses_dropout = True
    shards = True
    # Names of a new model's outputs.
    labels: ClassVar[tuple[str, ...]]
    # What `measures` returns of each example.
    measured: ClassVar[tuple[str, ...]]

    classifier_config: dict[str, Any] | None = None
    classifier_path: str | None = None
    backbone_path: str | None = None
    tokenizer_path: str = loading.GRAMMAR

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier: PreTrainedModel
        if self.backbone_path is None:
            loading.check_one_given(self.role, self.classifier_config, self.classifier_path)
        elif self.classifier_path is not None:
            problem = (
                f"{self.backbone_path} gets a new head, but classifier_path={self.classifier_path} has one"
            )
            raise ConfigurationError(f"{problem}: give only one of them", key="backbone_path")
        fixed = sorted({"id2label", "label2id", "num_labels"} & {*(self.classifier_config or ())})
        if fixed:
            problem = f"{fixed[0]} is determined by the data; leave it out"
            raise ConfigurationError(problem, key="classifier_config")
        self._evaluated: list[Tensor] = []

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The classifier of classifier_path, or one with a new head or new weights from the seed."""
        if self.classifier_path is not None:
            return loading.load("classifier_path", self.classifier_path, self.role)
        names = {label: index for index, label in enumerate(self.labels)}
        labels = {"id2label": dict(enumerate(self.labels)), "label2id": names}
        config = {**labels, **(self.classifier_config or {})}
        if self.backbone_path is not None:
            return classifier_on("backbone_path", self.backbone_path, config, self.seed)
        tokenizer = loading.load_tokenizer("tokenizer_path", self.tokenizer_path)
        return loading.fresh_model(config, tokenizer, self.seed, self.role), tokenizer

    @abstractmethod
    def measures(self, batch: dict[str, Tensor]) -> Tensor:
        """The `measured` numbers of each of B examples, shape [len(measured), B]."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Collect what is measured of each example; averaged at the end."""
        self._evaluated.append(self.measures(batch))

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """The classifier's outputs, float32, shape [B, labels]."""
        mask = batch["attention_mask"].long()
        logits: Tensor = self.classifier(input_ids=batch["tokens"], attention_mask=mask).logits
        return logits.float()

    def logits_with_dropout(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """As `logits`, with the dropout of a step of training."""
        with forked_rng(derive_seed(self.seed, "dropout", batch_idx, self.global_rank), self.device):
            return self.logits(batch)

    def conclude_evaluation(self, stage: str) -> None:
        """Log means with standard errors."""
        columns = torch.cat(self._evaluated, 1)
        self._evaluated.clear()
        metrics: dict[str, float] = {}
        for name, values in zip(self.measured, columns, strict=True):
            mean, error = clustered_mean(values[:, None])
            metrics |= {name: mean.item(), f"{name}_se": error.item()}
        self.log_evaluation(stage, metrics)
        self.print(
            f"step {self.evaluated_step}: accuracy {metrics['accuracy']:.4f} ± {metrics['accuracy_se']:.4f}"
        )


@final
@dataclass(kw_only=True, eq=False, repr=False)
class RewardModule(ClassifierModule):
    """Maximum likelihood training of a classifier on labels, from new weights or from a given classifier.

    Its checkpoint can be the `reward_path` of DPO and RLOO: the reward is the log odds of the label
    "positive".
    """

    reads = ("labelled texts", "labelled texts")
    labels = ("negative", "positive")
    measured = ("loss", "accuracy")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the labels, in nats."""
        logits = self.logits_with_dropout(batch, batch_idx)
        loss = cross_entropy(logits, batch["labels"])
        accuracy = (logits.argmax(1) == batch["labels"]).float().mean()
        self.log_metrics("train", {"loss": loss.detach(), "accuracy": accuracy}, batch_size=len(logits))
        return loss

    def measures(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy of each text in nats, and whether its label is predicted, shape [2, B]."""
        logits, labels = self.logits(batch), batch["labels"]
        nats = cross_entropy(logits, labels, reduction="none")
        return torch.stack([nats, (logits.argmax(1) == labels).float()])

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[dict[str, Any]]:
        """Each text with its label and the label's probability."""
        labels = batch["labels"]
        texts = self.tokenizer.batch_decode(batch["tokens"], skip_special_tokens=True)
        probability = self.logits(batch).log_softmax(1).gather(1, labels[:, None])[:, 0].exp()
        rows = zip(texts, labels.tolist(), probability.tolist(), strict=True)
        return [{"text": text, "label": label, "probability": value} for text, label, value in rows]


@final
@dataclass(kw_only=True, eq=False, repr=False)
class PairwiseRewardModule(ClassifierModule):
    """Training of a reward model on preferences: the Bradley-Terry model, from new weights or a classifier.

    The probability that the chosen text is preferred is sigmoid(r(chosen) − r(rejected)). The reward r is the
    single output of a new model, or the log odds of the positive one of a given classifier's two labels. It
    is the reward of a checkpoint that is the `reward_path` of DPO and RLOO. Preferences determine it up to a
    constant.

    Reference: Bradley, Terry (1952), Biometrika 39; Ouyang et al. (2022), arXiv:2203.02155, Eq. (1).
    """

    reads = ("pairs of texts", "pairs of texts")
    labels = ("reward",)
    measured = ("loss", "accuracy", "margin")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean of −log sigmoid(r(chosen) − r(rejected)) over the pairs, in nats."""
        chosen, rejected = self._rewards(self.logits_with_dropout(batch, batch_idx))
        loss, stats = preference_loss(chosen, rejected, beta=1.0)
        metrics = {"loss": loss.detach(), "accuracy": stats.accuracy, "margin": stats.margin}
        self.log_metrics("train", metrics, batch_size=len(chosen))
        return loss

    def measures(self, batch: dict[str, Tensor]) -> Tensor:
        """Loss, whether the chosen text has the larger reward, and by how much, shape [3, B]."""
        chosen, rejected = self._rewards(self.logits(batch))
        margin = chosen - rejected
        return torch.stack([-logsigmoid(margin), (margin > 0).float(), margin])

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[dict[str, Any]]:
        """Both texts of each pair with their rewards."""
        chosen, rejected = self._rewards(self.logits(batch))
        texts = self.tokenizer.batch_decode(batch["tokens"], skip_special_tokens=True)
        names = "chosen", "rejected", "chosen_reward", "rejected_reward"
        columns = texts[: len(chosen)], texts[len(chosen) :], chosen.tolist(), rejected.tolist()
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _rewards(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of the chosen and of the rejected texts, shape [B] each."""
        outputs = logits.shape[1]
        if outputs > 2:
            problem = f"{self.classifier_path} has {outputs} labels; the reward needs one or two"
            raise ConfigurationError(problem, key="classifier_path")
        chosen, rejected = label_scores(logits, outputs - 1).chunk(2)
        return chosen, rejected
