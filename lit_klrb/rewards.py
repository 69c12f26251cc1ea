"""Rewards: a number for each text, from the embedded world, a classifier or any Python function."""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.batches import classifier_batch
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading

KEY = "reward_path"
RewardOutput = Literal["log_odds", "logit"]
# Texts that a classifier reads at a time; it decides no score.
BATCH_SIZE = 128


class Reward(Protocol):
    """Scores whole texts, prompt and completion together."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """One finite score a text, float32 [B]."""
        ...


class GrammarReward:
    """Log odds that a text of the embedded world is positive, exact and clipped.

    Args:
        grammar: The world that wrote the reviews.
    """

    def __init__(self, grammar: ReviewGrammar | None = None) -> None:
        self.grammar = grammar or ReviewGrammar()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Clipped log odds, float32 [B]."""
        return torch.tensor([self.grammar.clipped_log_odds(text) for text in texts])


class NoReward:
    """Zero for every text: for objectives that are a KL alone."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Zeros, float32 [B]."""
        return torch.zeros(len(texts))


class FunctionReward:
    """Any function from a list of texts to numbers, checked.

    Args:
        name: What to call it in an error.
        function: Returns one number per text: a sequence, an array, a tensor or a generator of them.

    Raises:
        ConfigurationError: If it is not a function; when called, if it returns anything else than one finite
            number per text.
    """

    def __init__(self, name: str, function: Callable[[Sequence[str]], Iterable[float]]) -> None:
        if isinstance(function, type) or not callable(function):
            kind = "a class" if isinstance(function, type) else brief(function)
            raise ConfigurationError(f"{name} is {kind}; a function of a list of texts expected", key=KEY)
        self.name, self.function = name, function

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The function's scores, float32 [B]."""
        given = self.function(texts)
        scores = as_numbers(given)
        if scores is None or scores.shape != (len(texts),):
            raise ConfigurationError(
                f"{self.name} must return {len(texts)} numbers for {len(texts)} texts, got {brief(given)}",
                key=KEY,
            )
        return finite(self.name, texts, scores)


def as_numbers(values: Any) -> Tensor | None:
    """Real numbers in whatever holds them as a float32 tensor; None if they are none.

    Example:
        >>> as_numbers(n / 2 for n in range(3)), as_numbers("good"), as_numbers(["1.5"])
        (tensor([0.0000, 0.5000, 1.0000]), None, None)
    """
    if isinstance(values, (str, bytes, Mapping)):
        return None
    if isinstance(values, Iterator):
        values = list(values)
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if numbers.is_complex() else numbers.detach().float()


def brief(value: Any, length: int = 60) -> str:
    """What a value is, in a line: the shape of a tensor, how many elements another one has, or all of it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    shown = repr(value)
    shown = shown if len(shown) <= length else f"{shown[:length]}..."
    return f"{len(value)} elements, {shown}" if isinstance(value, (list, tuple)) else shown


class ClassifierReward:
    """What a sequence classifier makes of a text: the log odds of one of its labels, or that label's logit.

    A classifier with a single output (a reward model) gives that output either way.

    Args:
        name: What to call it in an error.
        classifier: The model; it is frozen.
        tokenizer: Its own.
        label: Name or number of the label; by default the second of two, the positive one.
        output: Log odds, log p / (1 - p), or the raw logit.

    Raises:
        ConfigurationError: If there is no such label, or it has to be said which; when called, if a score is
            not finite.
    """

    def __init__(
        self,
        name: str,
        classifier: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        label: str | None = None,
        output: RewardOutput = "log_odds",
    ) -> None:
        self.name, self.classifier, self.tokenizer = name, loading.freeze(classifier), tokenizer
        self.index = label_index(name, dict(classifier.config.id2label or {}), label)
        self.output = output

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The classifier's scores, float32 [B]; texts longer than it can read lose their end."""
        parts = [self._scores(texts[i : i + BATCH_SIZE]) for i in range(0, len(texts), BATCH_SIZE)]
        return finite(self.name, texts, torch.cat(parts))

    def _scores(self, texts: Sequence[str]) -> Tensor:
        longest = getattr(self.classifier.config, "max_position_embeddings", self.tokenizer.model_max_length)
        batch = classifier_batch(self.tokenizer, texts, min(longest, self.tokenizer.model_max_length))
        logits = self.classifier(
            input_ids=batch["tokens"].to(self.classifier.device),
            attention_mask=batch["attention_mask"].long().to(self.classifier.device),
        ).logits.float()
        chosen: Tensor = logits[:, self.index]
        if self.output == "logit" or logits.shape[1] == 1:
            return chosen
        return chosen - torch.cat([logits[:, : self.index], logits[:, self.index + 1 :]], 1).logsumexp(1)


class WeightedReward:
    """A weighted sum of rewards.

    Args:
        parts: Rewards with their weights.
    """

    def __init__(self, parts: Sequence[tuple[Reward, float]]) -> None:
        self.parts = parts

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The sum, float32 [B]."""
        return torch.stack([weight * reward(texts).cpu() for reward, weight in self.parts]).sum(0)


def finite(name: str, texts: Sequence[str], scores: Tensor) -> Tensor:
    """The scores, if all are finite.

    Raises:
        ConfigurationError: With the first text whose score is not.
    """
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ConfigurationError(
            f"{name} gave {scores[wrong[0]].item()} for the text {texts[wrong[0]]!r}", key=KEY
        )
    return scores


def label_index(name: str, labels: Mapping[Any, str], label: str | None) -> int:
    """Which output of a classifier belongs to a label.

    Args:
        name: What to call the classifier in an error.
        labels: Names of its outputs.
        label: Name, upper or lower case, or number; None for the only output or the second of two.

    Raises:
        ConfigurationError: If it is none of them, or None with more than two.
    """
    names = {str(text).lower(): index for index, text in labels.items()}
    names |= {str(index): index for index in labels}
    if label is None and len(labels) <= 2:
        return len(labels) - 1
    if label is None or label.lower() not in names:
        raise ConfigurationError(
            f"{label} is not a label of {name}; it has {', '.join(map(str, labels.values()))}",
            key="reward_label",
        )
    index: int = names[label.lower()]
    return index


def load_reward(
    path: str | Mapping[str, float],
    label: str | None = None,
    output: RewardOutput = "log_odds",
    device: torch.device | str = "cpu",
) -> Reward:
    """The reward that `reward_path` names.

    Args:
        path: `"grammar"` for the embedded world, `"package.module:function"`, or a classifier: a hub id, a
            folder or a checkpoint of `RewardModule`; several of these with their weights are summed.
        label: Which label of a classifier is rewarded, see `ClassifierReward`.
        output: Its log odds or its logit.
        device: Where classifiers run.

    Raises:
        ConfigurationError: If there is no such reward.
    """
    if not isinstance(path, str):
        check_weights(path)
        return WeightedReward([(load_reward(p, label, output, device), w) for p, w in path.items()])
    if path == loading.GRAMMAR:
        return GrammarReward()
    module, colon, name = path.partition(":")
    if colon and not loading.is_checkpoint(path):
        return FunctionReward(path, import_function(path, module, name))
    source = KEY, path, loading.CLASSIFIER
    classifier = loading.load_model(*source).to(device)  # type: ignore[arg-type]
    return ClassifierReward(path, classifier, loading.load_tokenizer(*source), label, output)


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse a weighted sum of nothing, or with weights that are not finite.

    Raises:
        ConfigurationError: With the weights.
    """
    if not weights or not all(math.isfinite(weight) for weight in weights.values()):
        raise ConfigurationError(f"{dict(weights)} must name rewards, each with a finite weight", key=KEY)


def import_function(path: str, module: str, name: str) -> Any:
    """What `module:name` names.

    Raises:
        ConfigurationError: If there is no such thing, or importing its module fails.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's: anything may go wrong in it
        missing = isinstance(error, (ImportError, AttributeError))
        reason = str(error) if missing else f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"cannot import {path}: {' '.join(reason.split())}", key=KEY) from error
