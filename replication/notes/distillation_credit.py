"""Trial: weights of the credit for later KLs that are estimated in training, on enumerated models.

`python -m replication.notes.distillation_credit SEED` prints the numbers of distillation_credit.md.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_klrb.functional import leave_one_out_baseline, reward_to_go, token_stats
from replication.studies.distillation import _GROUP, DistillationStudy, MapPoint, _Adam
from replication.studies.tabular import TabularPairs

# What an estimate of signal and noise keeps per step
KEPT = 0.8
STUDY = DistillationStudy()


def to_come(kl: Tensor, discount: float = 1.0) -> Tensor:
    """Discounted sum of later KLs, shape [S, K, T]."""
    return reward_to_go(kl.flatten(0, 1), strict=True, discount=discount).view(kl.shape)


class Schedule:
    """How much the credit of each position for later KLs counts, shape [S, T]; by progress alone."""

    def __init__(
        self, weight: Callable[[float], float], *, discounts: bool = False, horizon: bool = False
    ) -> None:
        self.at, self.discounts, self.horizon = weight, discounts, horizon

    def credit(self, kl: Tensor, progress: float) -> tuple[Tensor, Tensor | float]:
        """The credit of each token, shape [S, K, T], and its weight."""
        value, length = self.at(progress), kl.shape[-1]
        if self.horizon:
            steps = round(value * length)
            beyond = torch.nn.functional.pad(to_come(kl)[..., steps:], (0, steps))
            return to_come(kl) - beyond, 1.0
        if self.discounts:
            return to_come(kl, value), 1.0
        return to_come(kl), value

    def observe(self, gradients: Tensor, credit: Tensor, tokens: Tensor, mask: Tensor) -> None:
        """Nothing is learned."""


class Normalised(Schedule):
    """The mean later KL instead of their sum."""

    def credit(self, kl: Tensor, progress: float) -> tuple[Tensor, Tensor | float]:
        """With as many later tokens as the completion has; the KL is 0 after its end."""
        return to_come(kl) / to_come((kl > 0).to(kl)).clamp(min=1), self.at(progress)


class Shrunk(Schedule):
    """max(0, 1 - noise / size) of the gradient of the credit, from all completions of earlier steps."""

    def __init__(self, *, by_position: bool, discounts: bool = False) -> None:
        super().__init__(lambda progress: progress, discounts=discounts)
        self.by_position, self.size, self.noise = by_position, torch.zeros(1), torch.zeros(1)

    @property
    def weight(self) -> Tensor:
        """The weight of each run and position; 0 at first."""
        return (1 - self.noise / self.size.clamp(min=1e-300)).clamp(min=0) * (self.size > 0)

    def credit(self, kl: Tensor, progress: float) -> tuple[Tensor, Tensor | float]:
        """With the weight of earlier steps."""
        if self.discounts and self.size.ndim > 1:
            powers = [to_come(kl, g / 10) for g in range(11)]
            nearest = (10 * self.weight).round().long().expand(len(kl), 1)
            stacked = torch.stack(powers)[nearest[:, 0], torch.arange(len(kl))]
            return stacked, 1.0
        weight = self.weight if self.size.ndim > 1 else 0.0
        return to_come(kl), weight[:, None] if isinstance(weight, Tensor) else weight

    def observe(self, gradients: Tensor, credit: Tensor, tokens: Tensor, mask: Tensor) -> None:
        """Add the gradients of each completion and position, shape [S, K, T, parameters]."""
        parts = gradients if self.by_position else gradients.sum(2, keepdim=True)
        mean, count = parts.mean(1), parts.shape[1]
        noise = (parts - mean[:, None]).square().sum((1, 3)) / (count * (count - 1))
        self.size = KEPT * self.size + mean.square().sum(-1)
        self.noise = KEPT * self.noise + noise


class Explained(Schedule):
    """The share of the credit's variance that a table of token values explained out of sample."""

    def __init__(self) -> None:
        super().__init__(lambda progress: progress)
        self.sums = self.counts = self.errors = self.variance = torch.zeros(1, dtype=torch.float64)

    def credit(self, kl: Tensor, progress: float) -> tuple[Tensor, Tensor | float]:
        """With the share of earlier steps."""
        share = (1 - self.errors / self.variance.clamp(min=1e-300)).clamp(min=0) * (self.variance > 0)
        return to_come(kl), share[:, None, None]

    def observe(self, gradients: Tensor, credit: Tensor, tokens: Tensor, mask: Tensor) -> None:
        """Predict the centred credit of this step, then add it to the table [S, V]."""
        chosen = torch.nn.functional.one_hot(tokens, STUDY.vocabulary).double() * mask[..., None]
        table = (
            self.sums / (self.counts + 2)
            if self.sums.ndim > 1
            else torch.zeros(len(credit), STUDY.vocabulary)
        )
        residual = (credit - torch.einsum("sktv,sv->skt", chosen, table.double())) * mask
        self.errors = KEPT * self.errors + residual.square().sum((1, 2))
        self.variance = KEPT * self.variance + (credit * mask).square().sum((1, 2))
        self.sums = KEPT * self.sums + torch.einsum("sktv,skt->sv", chosen, credit)
        self.counts = KEPT * self.counts + chosen.sum((1, 2))


ARMS: dict[str, Callable[[], Schedule]] = {
    "own token": lambda: Schedule(lambda progress: 0.0),
    "whole future": lambda: Schedule(lambda progress: 1.0),
    "discount 0 to 1": lambda: Schedule(lambda progress: progress, discounts=True),
    "weight 0 to 1": lambda: Schedule(lambda progress: progress),
    "horizon 0 to T": lambda: Schedule(lambda progress: progress, horizon=True),
    "normalised": lambda: Normalised(lambda progress: 1.0),
    "normalised 0 to 1": lambda: Normalised(lambda progress: progress),
    "signal share": lambda: Shrunk(by_position=False),
    "signal share by position": lambda: Shrunk(by_position=True),
    "signal share as discount": lambda: Shrunk(by_position=False, discounts=True),
    "explained share": Explained,
}


def final_kl(cell: MapPoint, arm: Schedule, seed: int) -> Tensor:
    """The exact KL after training, shape [rates, runs]; see `DistillationStudy._run`."""
    once = STUDY._pairs(seed, cell)
    runs, rates = len(once.policies), torch.tensor(STUDY.learning_rates, dtype=torch.float64)
    pairs = TabularPairs(
        once.policies.repeat(len(rates), 1, 1), once.references.repeat(len(rates), 1, 1), STUDY.max_length
    )
    rows, vocabulary = pairs.policies.shape[1:]
    optimizer, size = _Adam(pairs.policies), rates.repeat_interleave(runs)[:, None, None]
    model = torch.arange(len(pairs.policies))[:, None, None]
    for step in range(STUDY.steps):
        chosen = STUDY._completions(pairs, seed, cell, step, runs)
        tokens, mask, prefixes = pairs.tokens[chosen], pairs.mask[chosen], pairs.prefixes[chosen]
        place = prefixes % rows
        leaf = pairs.policies.requires_grad_()
        logits, others = leaf[model, place], pairs.references[model, prefixes]
        stats = token_stats(logits.flatten(0, 1), others.flatten(0, 1), tokens.flatten(0, 1)).masked(
            mask.flatten(0, 1)
        )
        assert stats.kl is not None
        kl = stats.kl.view(mask.shape)
        (gradient,) = torch.autograd.grad(kl.sum((0, 2)).mean(), leaf)  # each token's own
        with torch.no_grad():
            credit, weight = arm.credit(kl.detach(), step / (STUDY.steps - 1))
            flat = credit.flatten(0, 1)
            centred = ((flat - leave_one_out_baseline(flat, _GROUP)).view(mask.shape)) * mask
            score = torch.nn.functional.one_hot(tokens, vocabulary) - logits.softmax(-1)
            scattered = torch.zeros(*mask.shape, rows, vocabulary, dtype=torch.float64)
            index = place[..., None, None].expand(*mask.shape, 1, vocabulary)
            scattered.scatter_(3, index, (centred[..., None] * score)[..., None, :])
            future = (weight * mask)[..., None, None] * scattered
            arm.observe(scattered.flatten(3), centred, tokens, mask)
            gradient = gradient + future.sum(2).mean(1)
            direction = size * (1 - step / STUDY.steps) * optimizer.direction(gradient)
            pairs.policies = pairs.policies.detach() - direction
    return pairs.exact_kl().nan_to_num(nan=1e6).clamp(max=1e6).view(len(rates), runs)


def compared(cell: MapPoint, seed: int) -> dict[str, tuple[float, float, float]]:
    """Mean final KL of each arm at its own rate, and paired log ratio to the discount with its error."""
    finals: dict[str, Any] = {}
    for name, arm in ARMS.items():
        kls = final_kl(cell, arm(), seed)
        rate = kls[:, : STUDY.selection].mean(1).argmin()
        finals[name] = kls[rate, STUDY.selection :]
    found = {}
    for name, kls in finals.items():
        ratio = (kls / finals["discount 0 to 1"]).log()
        found[name] = kls.mean().item(), ratio.mean().item(), (ratio.std() / len(ratio) ** 0.5).item()
    return found


if __name__ == "__main__":
    chosen_seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    for cell in STUDY.cells:
        print(*cell)
        for name, (mean, ratio, error) in compared(cell, chosen_seed).items():
            print(f"  {name:26} {mean:8.4f}  {ratio:+.3f} ± {error:.3f}")
