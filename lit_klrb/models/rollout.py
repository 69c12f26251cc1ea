"""Prompts with their completions: the token ids that sampling returns and that scoring reads."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.models.capabilities import position_ids


class Rollout(NamedTuple):
    """Prompts with their completions, prompt-major: the K completions of a prompt are adjacent rows.

    Args:
        tokens: Left-padded prompts followed by right-padded completions, shape [B, P+T].
        attention_mask: True on tokens other than padding, shape [B, P+T].
        mask: True on completion tokens, EOS included, shape [B, T].
        logprobs: Log-probabilities of the completions under the distribution that they were drawn from, if
            that is not the policy's as `Scorer` computes it, shape [B, T]; None otherwise.
    """

    tokens: Tensor
    attention_mask: Tensor
    mask: Tensor
    logprobs: Tensor | None = None

    @property
    def completions(self) -> Tensor:
        """Token ids of the completions, shape [B, T]."""
        return self.tokens[:, -self.mask.shape[1] :]

    @property
    def position_ids(self) -> Tensor:
        """Positions that do not count padding, shape [B, P+T]."""
        return position_ids(self.attention_mask)

    def unfinished(self, ends: Sequence[int]) -> Tensor:
        """Whether a completion has none of the tokens that end one, bool, shape [B]."""
        return ~(is_end(self.completions, ends) & self.mask).any(1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Rollout":
        """Apply a function to every field that is not None, such as indexing or a change of device."""
        logprobs = None if self.logprobs is None else change(self.logprobs)
        return Rollout(change(self.tokens), change(self.attention_mask), change(self.mask), logprobs)

    def rows(self, rows: slice | Tensor) -> "Rollout":
        """Some of the sequences, by a slice, indices or a mask."""
        return self.map(lambda field: field[rows])

    def part(self, rows: Tensor, length: int) -> "Rollout":
        """Some of the sequences without their last completion positions, which must be padding."""
        width = self.tokens.shape[1] - self.mask.shape[1] + length
        logprobs = None if self.logprobs is None else self.logprobs[rows, :length]
        return Rollout(
            self.tokens[rows, :width], self.attention_mask[rows, :width], self.mask[rows, :length], logprobs
        )

    def cut(self, length: int) -> "Rollout":
        """Prompts with the first tokens of their completions; the shapes stay.

        Example:
            >>> mask = torch.ones(1, 3, dtype=torch.bool)
            >>> Rollout(torch.tensor([[5, 6, 7]]), mask, mask).cut(2).attention_mask.tolist()
            [[True, True, False]]
        """
        mask, attention = self.mask.clone(), self.attention_mask.clone()
        mask[:, length:] = False
        attention[:, attention.shape[1] - mask.shape[1] + length :] = False
        return self._replace(attention_mask=attention, mask=mask)

    def after(self, prompts: Tensor, prompt_mask: Tensor) -> "Rollout":
        """The same completions after other prompts, such as those that a teacher reads.

        Args:
            prompts: Left-padded prompt ids, shape [P, M]; B is a multiple of P.
            prompt_mask: True on prompt tokens other than padding, shape [P, M].

        Example:
            >>> mask = torch.ones(2, 1, dtype=torch.bool)
            >>> rollout = Rollout(torch.tensor([[5, 7], [5, 8]]), mask.repeat(1, 2), mask)
            >>> rollout.after(torch.tensor([[3, 4]]), torch.tensor([[True, True]])).tokens.tolist()
            [[3, 4, 7], [3, 4, 8]]
        """
        count, length = len(self.tokens) // len(prompts), self.mask.shape[1]
        prompts, prompt_mask = (ids.repeat_interleave(count, 0) for ids in (prompts, prompt_mask))
        attention = torch.cat([prompt_mask.bool(), self.attention_mask[:, -length:]], 1)
        return Rollout(torch.cat([prompts, self.completions], 1), attention, self.mask)


def is_end(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """Whether each token is one of those that end a completion, bool, of the same shape."""
    return torch.isin(tokens, tokens.new_tensor(ends))


def completion_mask(completions: Tensor, ends: Sequence[int]) -> Tensor:
    """True up to and including the first end; true everywhere without one.

    Example:
        >>> completion_mask(torch.tensor([[5, 0, 0], [5, 1, 0], [5, 6, 7]]), ends=[0, 1]).tolist()
        [[True, True, False], [True, True, False], [True, True, True]]
    """
    end = is_end(completions, ends).long()
    return end.cumsum(-1) == end
