"""Noise of gradients at given checkpoints, as a whole and by layer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

from torch import Tensor, nn

from lit_klrb import schema
from lit_klrb.errors import check_at_least, check_positive
from lit_klrb.estimators import (
    KLEstimator,
    MonteCarlo,
    MonteCarloRewardToGo,
    RaoBlackwell,
    RaoBlackwellControlVariate,
    RaoBlackwellLite,
    RaoBlackwellSequence,
    ReleasedMonteCarlo,
    ReleasedRaoBlackwell,
)
from lit_klrb.estimators.labels import check_different
from lit_klrb.studies.base import lower_triangle, rounded
from lit_klrb.studies.gradient_noise import Task, all_gradients, gram
from replication.studies.model_pairs import CheckpointPair, PairStudy


def _estimators() -> list[KLEstimator]:
    corrected = [MonteCarlo(), MonteCarloRewardToGo(), RaoBlackwell(), RaoBlackwellSequence()]
    released = [ReleasedMonteCarlo(), ReleasedRaoBlackwell()]
    return [*corrected, RaoBlackwellLite(), *released, RaoBlackwellControlVariate()]


@final
@dataclass(frozen=True, kw_only=True)
class PairGradientNoiseStudy(PairStudy[CheckpointPair]):
    """Compares the noise of gradients under all estimators at given checkpoints.

    As `GradientNoiseStudy` does during a training: B batches of different prompts and completions, the same
    for all estimators, and the Gram matrix of their gradients. Beside it the artifact has, for each layer,
    half the squared distance between the gradients of disjoint pairs of batches, whose mean is the variance.

    Args:
        pairs: Checkpoints, each a snapshot.
        estimators: Different estimators; by default the unbiased ones, those of the code released
            with arXiv:2504.10637 among them.
        beta: Weight of the KL, in units of reward per nat.
        completions: Completions per prompt.
        batches: Independent batches (B).
        prompts_per_batch: Prompts per batch.
        earlier_rollouts: Rollouts of the same policy on other prompts that the estimators remember, as in
            training those before. With 0, estimators that need token values are refused.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    name: ClassVar[str] = schema.GRADIENT_NOISE

    pairs: Sequence[CheckpointPair]
    estimators: Sequence[KLEstimator] | None = None
    beta: float = 0.07
    completions: int = 2
    batches: int = 64
    prompts_per_batch: int = 8
    earlier_rollouts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(4, batches=self.batches)
        check_at_least(2, completions=self.completions)
        check_at_least(1, prompts_per_batch=self.prompts_per_batch)
        check_at_least(0, earlier_rollouts=self.earlier_rollouts)
        check_positive(beta=self.beta)
        check_different(self.compared)

    @property
    def compared(self) -> Sequence[KLEstimator]:
        """The estimators compared."""
        return _estimators() if self.estimators is None else self.estimators

    @property
    def design(self) -> dict[str, Any]:
        """Estimators and batches."""
        return {
            "estimators": [estimator.label for estimator in self.compared],
            "batches": self.batches,
            "prompts": self.prompts_per_batch,
        }

    def snapshot(self, pair: CheckpointPair, seed: int) -> dict[str, Any]:
        """The Gram matrix of all gradients, and their noise by layer."""
        models, reward = pair.load(), pair.load_reward()
        task = Task(
            models,
            pair.sampling(self.completions),
            self.beta,
            partial(models.rewards, reward),
            pair.policy_path,
        )
        everything = pair.batches(models, self.earlier_rollouts + self.batches, self.prompts_per_batch)
        earlier, measured = everything[: self.earlier_rollouts], everything[self.earlier_rollouts :]
        gradients = all_gradients(task, self.compared, measured, earlier, seed)
        return {
            "beta": self.beta,
            "completions": self.completions,
            "gram": lower_triangle(gram(gradients.flatten(0, 1))),
            "layers": by_layer(models.policy, gradients),
        }


def by_layer(model: nn.Module, gradients: Tensor) -> dict[str, dict[str, Any]]:
    """Half the squared distances of the gradients of disjoint pairs of batches, for each layer.

    Args:
        model: The model, whose trained parameters the gradients are of.
        gradients: Of the reward, then under each of E estimators, on B batches, shape [1 + E, B, parameters].

    Returns:
        Layer -> "kl" or "total" -> one number per estimator and pair of batches, shape [E, B / 2].
    """
    found: dict[str, dict[str, Tensor]] = {}
    pairs = gradients.shape[1] // 2
    start = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part = gradients[..., start : start + parameter.numel()].double()
        start += parameter.numel()
        for term, values in (("kl", part[1:] - part[:1]), ("total", part[1:])):
            difference = values[:, 0 : 2 * pairs : 2] - values[:, 1 : 2 * pairs : 2]
            halves = difference.square().sum(-1) / 2
            layer = found.setdefault(layer_of(name), {})
            layer[term] = layer[term] + halves if term in layer else halves
    return {layer: {term: rounded(v, 6) for term, v in terms.items()} for layer, terms in found.items()}


def layer_of(name: str) -> str:
    """The layer to which a parameter belongs.

    Example:
        >>> layer_of("transformer.h.1.attn.c_attn.weight"), layer_of("transformer.wte.weight")
        ('block 1', 'embeddings and head')
    """
    found = re.search(r"\.(\d+)\.", name)
    return f"block {found[1]}" if found else "embeddings and head"
