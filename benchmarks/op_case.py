"""Inputs and results of the operation at one size, and its exact results."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.functional import token_stats

from .measure import DEVICE


class Case(NamedTuple):
    """N rows of hidden states under two heads; loss = sum of score_weights · logprob + kl_weights · KL."""

    hidden: Tensor
    weight: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    tokens: Tensor
    score_weights: Tensor
    kl_weights: Tensor

    def rows(self, count: int) -> "Case":
        """The first rows, under the same heads."""
        cut = {name: value[:count] for name, value in self._asdict().items() if not name.endswith("weight")}
        return self._replace(**cut)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Hidden states and head that require gradients."""
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()


class Outcome(NamedTuple):
    """The results of a variant: gradients of hidden states and head, and statistics if it computes them."""

    gradients: tuple[Tensor, Tensor]
    logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True)
class Size:
    """A head, a batch and a number format; memory is measured on a batch of another size."""

    name: str
    vocabulary: int
    width: int
    tokens: int
    dtype: torch.dtype
    memory_tokens: int

    def case(self, draw: bool = True) -> Case:
        """Logits with the variance of a language model's, a similar reference, and tokens.

        Args:
            draw: Tokens from the policy; otherwise any, which is faster.
        """
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, spread: float) -> Tensor:
            return spread * torch.randn(*shape, generator=generator)

        hidden = normal(self.tokens, self.width, spread=1.0)
        weight = normal(self.vocabulary, self.width, spread=3 / self.width**0.5)
        tokens = torch.randint(self.vocabulary, (self.tokens,), generator=generator)
        if draw:
            probabilities = ((rows @ weight.T).softmax(-1) for rows in hidden.split(64))
            drawn = [torch.multinomial(rows, 1, generator=generator) for rows in probabilities]
            tokens = torch.cat(drawn)[:, 0]
        ref_hidden = hidden + normal(self.tokens, self.width, spread=0.05)
        case = Case(
            hidden.to(self.dtype),
            weight.to(self.dtype),
            ref_hidden.to(self.dtype),
            weight.to(self.dtype).clone(),
            tokens,
            normal(self.tokens, spread=1.0),
            torch.rand(self.tokens, generator=generator),
        )
        return Case(*(tensor.to(DEVICE) for tensor in case))


def exact(case: Case) -> Outcome:
    """Float64 results by definition: whole rows of logits and autograd, 32 rows at a time."""
    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in case.leaves())
    ref_hidden, ref_weight = case.ref_hidden.double(), case.ref_weight.double()
    parts = []
    for start in range(0, len(hidden), 32):
        rows = slice(start, start + 32)
        logits, ref_logits = hidden[rows] @ weight.T, ref_hidden[rows] @ ref_weight.T
        stats = token_stats(logits[None], ref_logits[None], case.tokens[None, rows])
        (case.score_weights[rows] * stats.logprobs + case.kl_weights[rows] * stats.kl).sum().backward()
        parts.append([field[0].detach() for field in stats[:3]])
    return Outcome((hidden.grad, weight.grad), *(torch.cat(field) for field in zip(*parts, strict=True)))
