"""Rewards of texts, from the embedded world, a classifier or any Python function."""

import logging
import math
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.batches import pad
from lit_klrb.data.chat import Conversation, is_messages
from lit_klrb.data.encode import classifier_ids
from lit_klrb.data.grammar import ReviewGrammar, split_words
from lit_klrb.errors import ConfigurationError, NoAnswerError, brief
from lit_klrb.models import loading
from lit_klrb.models.capabilities import has_weights
from lit_klrb.reward_functions import (
    COMPLETIONS,
    KEY,
    LOG,
    NO_COLUMNS,
    PROMPTS,
    STATE,
    Columns,
    FunctionReward,
    TrainerState,
    finite,
    import_member,
    is_unavailable,
)

logger = logging.getLogger(__name__)
RewardOutput = Literal["log_odds", "logit"]
# Number of texts per forward pass of a classifier; has no influence on scores.
BATCH_SIZE = 128
# The most tokens that a classifier reads, if neither it nor its tokenizer has a limit.
LONGEST = 2**20
LIMITS = "max_position_embeddings", "max_seq_len"
# Seconds before the first retry of a reward that gets no answer; each further one takes twice as long.
PATIENCE = 5
# Texts of different lengths, that check a classifier.
PROBE = ("a", "a film", "a film that I saw")


class Reward(Protocol):
    """Scores complete texts, which are prompts with completions."""

    def __call__(self, texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
        """One finite score per text, float32, shape [B].

        Args:
            texts: B texts, each a prompt with its completion.
            columns: What functions of completions read: `prompts`, `completions`, and columns of the data,
                each with one entry per text.
        """
        ...


class GrammarReward:
    """Exact log odds that a text of the embedded world is positive, clipped."""

    def __init__(self) -> None:
        self.grammar = ReviewGrammar()
        self.known = frozenset(self.grammar.vocabulary)

    def __call__(self, texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
        """Clipped log odds, float32 [B].

        Raises:
            ConfigurationError: If more than a third of the words are not the grammar's.
        """
        words = [word for text in texts for word in split_words(text)]
        unknown = [word for word in words if word not in self.known]
        if len(unknown) > len(words) / 3:
            about = f"{len(unknown)} of {len(words)} words are not in its vocabulary, such as {unknown[0]!r}"
            problem = f"grammar scores the embedded reviews only, and {about}"
            raise ConfigurationError(f"{problem}; name a classifier or package.module:function", key=KEY)
        return torch.tensor([self.grammar.clipped_log_odds(text) for text in texts])


def no_reward(texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
    """A reward of zero for every text, for objectives without a reward, float32 [B]."""
    return torch.zeros(len(texts))


class ClassifierReward:
    """The log odds of one of a classifier's labels, or that label's logit.

    For a classifier with a single output (a reward model), the reward is that output in both cases.

    Args:
        name: The classifier's name in error messages.
        classifier: The model; it is frozen.
        tokenizer: The classifier's tokenizer.
        label: Name or number of the label; by default the second of two, the positive one.
        output: Log odds, log p / (1 - p), or the raw logit.

    Raises:
        ConfigurationError: If the label is unknown, or None with more than two labels; when called, if a
            score is not finite.
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
    def __call__(self, texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
        """The classifier's scores, float32, shape [B]; texts longer than its context are truncated.

        Conversations become texts by the classifier's own chat template, if it has one.
        """
        has_template = self.tokenizer.chat_template is not None
        chats = has_template and is_messages(next(iter(columns.get(PROMPTS, ())), None))
        if chats:
            origin = f"{self.name}: a completion"
            pairs = zip(columns[PROMPTS], columns[COMPLETIONS], strict=True)
            whole = (Conversation((*prompt, *answer), origin) for prompt, answer in pairs)
            texts = [conversation.text(KEY, self.tokenizer) for conversation in whole]
        starts = range(0, len(texts), BATCH_SIZE)
        parts = [self._scores(texts[i : i + BATCH_SIZE], special_tokens=not chats) for i in starts]
        return finite(self.name, texts, torch.cat(parts))

    def _scores(self, texts: Sequence[str], special_tokens: bool) -> Tensor:
        limits = [getattr(self.classifier.config, name, None) or LONGEST for name in LIMITS]
        # Some models have -1 for none
        longest = min(n for n in (*limits, self.tokenizer.model_max_length, LONGEST) if n > 0)
        rows = [classifier_ids(text, self.tokenizer, special_tokens, longest) for text in texts]
        batch = pad(rows, self.tokenizer.pad_token_id, side="right")
        tokens, mask = (values.long().to(self.classifier.device) for values in batch.values())
        logits = self.classifier(input_ids=tokens, attention_mask=mask).logits.float()
        return label_scores(logits, self.index, self.output)


class WeightedReward:
    """A weighted sum of the rewards that have something to say about a completion; see `FunctionReward`.

    Args:
        parts: Rewards with their weights.
    """

    def __init__(self, parts: Sequence[tuple[Reward, float]]) -> None:
        self.parts = parts

    def __call__(self, texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
        """The weighted sum, float32, shape [B].

        Raises:
            ConfigurationError: If no reward has a score for a completion; names the first.
        """
        scores = torch.stack([weight * reward(texts, columns).cpu() for reward, weight in self.parts])
        missing = scores.isnan().all(0).nonzero().flatten().tolist()
        if missing:
            about = f"{len(missing)} of {len(texts)} completions, such as {texts[missing[0]]!r}"
            problem = f"every reward gives None for {about}"
            raise ConfigurationError(f"{problem}; each needs a number from one of them", key=KEY)
        return scores.nansum(0)


class TrainingReward:
    """A reward that may ask for the state of the training, and log numbers.

    Args:
        reward: The reward.
        state: Gives the state, and whether the completions are those of training; evaluations log nothing.
        retries: How often a reward that gets no answer, see `is_unavailable`, is called again, after 5, 10,
            20, ... seconds.
    """

    def __init__(
        self, reward: Reward, state: Callable[[], tuple[TrainerState, bool]], retries: int = 0
    ) -> None:
        self.reward, self.state, self.retries = reward, state, retries
        self.logged: dict[str, list[float]] = {}
        self.retried = 0  # how often it was called again, since this was logged

    def __call__(self, texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
        """The reward's scores, float32, shape [B].

        Raises:
            NoAnswerError: If it gets no answer, also after the last retry.
        """
        state, training = self.state()

        def record(name: str, value: float) -> None:
            if not (isinstance(name, str) and name and name.isprintable()):
                raise ConfigurationError(f"{LOG}: {name!r} is not a printable name", key=KEY)
            if training:
                self.logged.setdefault(name, []).append(float(value))

        available: Any = ChainMap({STATE: state, LOG: record}, columns)  # type: ignore[arg-type]
        for seconds in (*(PATIENCE * 2**number for number in range(self.retries)), None):
            try:
                return self.reward(texts, available)
            except Exception as error:
                if not is_unavailable(error):
                    raise
                line = f"{type(error).__name__}: {brief(error)}"
                if seconds is None:
                    raise NoAnswerError(f"{line}, after {self.retries} retries", key=KEY) from error
                logger.warning(f"{KEY}: {line}; tried again in {seconds} s")
                self.retried += 1
                time.sleep(seconds)
        raise AssertionError("unreachable")

    def metrics(self) -> dict[str, float]:
        """The mean of each number that was logged since the last call."""
        means = {name: sum(values) / len(values) for name, values in self.logged.items()}
        self.logged.clear()
        return means


def classifiers_of(reward: Reward) -> list[PreTrainedModel]:
    """The classifiers that a reward consists of."""
    if isinstance(reward, ClassifierReward):
        return [reward.classifier]
    parts = [part for part, _ in reward.parts] if isinstance(reward, WeightedReward) else []
    parts += [reward.reward] if isinstance(reward, TrainingReward) else []
    return [model for part in parts for model in classifiers_of(part)]


def label_scores(logits: Tensor, index: int, output: RewardOutput = "log_odds") -> Tensor:
    """The reward of a label, shape [B].

    Args:
        logits: A classifier's outputs, shape [B, labels].
        index: Index of the label.
        output: Log odds, log p / (1 - p), or the logit; with a single label the logit in both cases.

    Example:
        >>> label_scores(torch.tensor([[1.0, 3.0], [2.0, 0.0]]), index=1)
        tensor([ 2., -2.])
    """
    chosen = logits[:, index]
    if output == "logit" or logits.shape[1] == 1:
        return chosen
    # log p / (1 - p) = logit - logsumexp of all other logits
    return chosen - torch.cat([logits[:, :index], logits[:, index + 1 :]], 1).logsumexp(1)


def label_index(name: str, labels: Mapping[Any, str], label: str | None) -> int:
    """The index of a label among a classifier's outputs."""
    names = {str(text).lower(): index for index, text in labels.items()}
    names |= {str(index): index for index in labels}
    if label is None and len(labels) <= 2:
        return len(labels) - 1
    if label is None or label.lower() not in names:
        has = ", ".join(map(str, labels.values()))
        raise ConfigurationError(f"{label} is not a label of {name}; it has {has}", key="reward_label")
    index: int = names[label.lower()]
    return index


def load_reward(
    path: str | Mapping[str, float],
    label: str | Mapping[str, str] | None = None,
    output: RewardOutput = "log_odds",
    device: torch.device | str = "cpu",
) -> Reward:
    """Load the reward given by `reward_path`.

    Args:
        path: `"grammar"` for the embedded world, `"package.module:function"`, or a classifier: a hub id, a
            folder or a checkpoint of a reward module. A mapping from these to weights gives a weighted sum.
        label: Rewarded label of a classifier, see `ClassifierReward`; a mapping from classifiers to labels if
            there are several.
        output: Whether the reward is the label's log odds or its logit.
        device: Device of classifiers.

    Raises:
        ConfigurationError: If it cannot be loaded.
    """
    parts, labels = reward_parts(path, label)
    rewards = [(_load_part(part, labels.get(part), output, device), weight) for part, weight in parts.items()]
    is_alone = isinstance(path, str) and not isinstance(rewards[0][0], FunctionReward)
    return rewards[0][0] if is_alone else WeightedReward(rewards)


def reward_parts(
    path: str | Mapping[str, float], label: str | Mapping[str, str] | None
) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """The weight of each reward, and the rewarded label of each classifier that has one."""
    parts = {path: 1.0} if isinstance(path, str) else path
    if odd := [name for name in parts if not isinstance(name, str)]:
        raise ConfigurationError(f"{odd[0]!r} is not the name of a reward", key=KEY)
    if not parts or not all(math.isfinite(weight) for weight in parts.values()):
        raise ConfigurationError(f"{dict(parts)} must name rewards, each with a finite weight", key=KEY)
    classifiers = [part for part in parts if is_classifier(part)]
    if label is None:
        return parts, {}
    if not classifiers:
        raise ConfigurationError(f"{label} needs a classifier, got {', '.join(parts)}", key="reward_label")
    labels = dict.fromkeys(classifiers, label) if isinstance(label, str) else label
    if unknown := sorted(labels.keys() - {*classifiers}):
        problem = f"{unknown[0]} is not a classifier of reward_path; it has {', '.join(classifiers)}"
        raise ConfigurationError(problem, key="reward_label")
    return parts, labels


def _load_part(path: str, label: str | None, output: RewardOutput, device: torch.device | str) -> Reward:
    if path == loading.GRAMMAR:
        return GrammarReward()
    if not is_classifier(path):
        module, _, name = path.partition(":")
        return FunctionReward(path, import_member(path, module, name, KEY))
    classifier, tokenizer = loading.load(KEY, path, loading.CLASSIFIER)
    reward = ClassifierReward(path, classifier, tokenizer, label, output)
    if has_weights(classifier):
        classifier.to(device)  # type: ignore[arg-type]
        with loading.errors_of(KEY, path):
            _check_padding(reward)
    return reward


def _check_padding(reward: ClassifierReward) -> None:
    """Check that padding changes no score, as it does where a classifier reads the last position."""
    together, alone = reward(PROBE), torch.cat([reward([text]) for text in PROBE])
    rounding = max(1e-3, 16 * torch.finfo(reward.classifier.dtype).eps)
    if (together - alone).abs().max() > rounding * max(1.0, float(alone.abs().max())):
        raise ConfigurationError("the padding of shorter texts changes its scores")


def is_classifier(path: str) -> bool:
    """Whether the path of a reward names a model rather than the embedded world or a function."""
    return path != loading.GRAMMAR and (":" not in path or loading.is_checkpoint(path))
