"""A table of token values, fitted to the rewards or the KLs of earlier rollouts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, check_at_least, check_positive
from lit_klrb.estimators.base import Predicted
from lit_klrb.estimators.token_counts import (
    CentredCounts,
    Completions,
    centred,
    conjugate_gradients,
    token_sums,
)
from lit_klrb.functional.baselines import check_group_size
from lit_klrb.functional.credit import reward_to_go

# 2,048 completions, and tokens of about as many.
_WINDOWS: dict[Predicted, int] = {"rewards": 2_048, "kl_to_come": 65_536}


class TokenValues:
    """Predicts rewards, up to a constant per prompt, by sums of token values: r(y) ~ sum_t a(y_t).

    The values are a ridge regression of rewards on token counts X, both centred within prompts, over a window
    of completions: a minimises |r - X a|^2 + ridge |a|^2. This is the best linear unbiased prediction if the
    variance of the values is 1 / ridge times that of the residuals. There is one table for each of `ridges`,
    and a table of zeros. The table in use is the one with the best predictions of rollouts before it was
    fitted to them, so it is zero if no table predicts the rewards. After `start_from` there is also a table
    for each ridge that shrinks towards given values instead of zero.

    After every rollout, the tables are improved by a few steps of conjugate gradients, which do not form the
    matrix of counts, so large vocabularies cost little. Everything is computed on the CPU in a fixed order:
    processes that observe the same completions have the same table.

    The weights of a rollout must use a table fitted before it: call `fit`, compute statistics and weights
    with `table`, then call `observe`.

    Args:
        window: Maximum number of completions (default 2,048) or, for the KL to come, of tokens (65,536);
            older rollouts are dropped.
        ridges: Candidate penalties, in squared counts; larger ones shrink more. The largest is used until a
            rollout has been predicted.
        iterations: Steps of conjugate gradients per fit.
        predicted: What is observed: rewards (`observe`), or the KL to come (`observe_to_come`).

    Example:
        >>> values = TokenValues(ridges=(0.01,), iterations=10)
        >>> values.table is None
        True
        >>> tokens, rewards = torch.tensor([[0, 1], [0, 2]]), torch.tensor([1.0, 3.0])
        >>> values.observe(tokens, torch.ones(2, 2) > 0, rewards, group_size=2)
        >>> values.fit(vocabulary=4)
        >>> [round(value, 2) for value in values.table.tolist()]
        [0.0, -0.99, 0.99, 0.0]
    """

    def __init__(
        self,
        window: int | None = None,
        ridges: Sequence[float] = (2.0, 8.0, 32.0, 128.0),
        iterations: int = 3,
        predicted: Predicted = "rewards",
    ) -> None:
        window = _WINDOWS[predicted] if window is None else window
        check_at_least(1, window=window, iterations=iterations, ridges=len(ridges))
        check_positive(ridges=min(ridges))
        self.window, self.iterations, self.predicted = window, iterations, predicted
        self._ridges = torch.tensor(sorted(ridges), dtype=torch.float64)
        # One column per ridge, again one per ridge if there is a prior, and a column of zeros
        self._tables = torch.zeros(0, len(ridges) + 1, dtype=torch.float64)
        # Squared prediction errors of each column on rollouts before it was fitted to them
        self._errors = torch.zeros(len(ridges) + 1, dtype=torch.float64)
        self._chosen = len(ridges) - 1
        # The values that the second columns shrink towards, [V]; empty without
        self._prior = torch.zeros(0, dtype=torch.float64)
        nothing = torch.zeros(0, dtype=torch.int64)
        self._window = Completions(nothing, nothing, torch.zeros(0, dtype=torch.float64))
        self._group_size = 1

    @classmethod
    def of_completions(
        cls, parts: Sequence[tuple[Tensor, Tensor, Tensor]], group_size: int, vocabulary: int
    ) -> "TokenValues":
        """Values fitted to a fixed set of completions; fits to the parts before predict each part.

        Parts are tokens [B, T], mask [B, T] and rewards [B], see `observe`.
        """
        values = cls(window=sum(len(mask) for _, mask, _ in parts), iterations=10)
        for tokens, mask, rewards in parts:
            values.fit(vocabulary)
            values.observe(tokens, mask, rewards, group_size)
        values.fit(vocabulary)
        return values

    @property
    def table(self) -> Tensor | None:
        """The values of the latest fit, zeros after `start_from`, float32, shape [V]; None without either."""
        return self._tables[:, self._chosen].float() if len(self._tables) else None

    @property
    def explained(self) -> float:
        """Share of the within-prompt variance of rewards that the best table predicted on new rollouts."""
        return float(1 - self._errors.min() / self._errors[-1]) if self._errors[-1] > 0 else 0.0

    def start_from(self, prior: Tensor) -> None:
        """Add tables that shrink towards given values instead of zero, before anything is fitted.

        Values of another reward do no harm: the table in use is zero until a rollout has been predicted,
        and then the one that predicted best.

        Args:
            prior: A value for every token, independent of the completions that are weighted later, shape [V].
        """
        ridges = len(self._ridges)
        self._prior = prior.cpu().double()
        self._errors = torch.zeros(2 * ridges + 1, dtype=torch.float64)
        self._chosen = 2 * ridges
        self._tables = torch.zeros(len(prior), 2 * ridges + 1, dtype=torch.float64)
        self._tables[:, ridges:-1] = self._prior[:, None]

    def observe(self, tokens: Tensor, mask: Tensor, rewards: Tensor, group_size: int) -> None:
        """Evaluate the tables on a rollout, then add it to the window for the next fit.

        Args:
            tokens: Token ids of the completions of all processes, shape [B, T].
            mask: True on completion tokens, shape [B, T].
            rewards: Training reward of each completion, shape [B].
            group_size: Completions per prompt; the same in every rollout.
        """
        check_group_size(len(mask), group_size)
        if len(self._window.lengths) and group_size != self._group_size:
            raise ConfigurationError(
                f"must be {self._group_size} as before, got {group_size}", key="group_size"
            )
        self._group_size = group_size
        tokens, mask, rewards = tokens.cpu(), mask.cpu(), rewards.cpu().double()
        new = Completions(tokens[mask], mask.sum(1), centred(rewards, group_size))
        if len(self._tables):
            self._cover(new.vocabulary)
            predicted = centred(token_sums(new, self._tables), group_size)
            errors = (new.rewards[:, None] - predicted).square().sum(0)
            # Earlier errors lose half their weight per window of completions
            self._errors = errors + 0.5 ** (len(mask) / self.window) * self._errors
        excess = len(self._window.lengths) + len(mask) - self.window
        # Only complete groups are dropped, and never from the new rollout
        excess = min(max(-(-excess // group_size) * group_size, 0), len(self._window.lengths))
        kept = Completions(
            self._window.tokens[int(self._window.lengths[:excess].sum()) :],
            self._window.lengths[excess:],
            self._window.rewards[excess:],
        )
        self._window = Completions(*(torch.cat(pair) for pair in zip(kept, new, strict=True)))

    def observe_to_come(
        self, tokens: Tensor, mask: Tensor, kl: Tensor, group_size: int, discount: float = 1.0
    ) -> None:
        """`observe` for values that predict the KL after each token from that token alone.

        Each token counts as a completion whose reward is the KL to come; those at a position of the
        completions of a prompt are a group. The window is therefore one of tokens.
        """
        to_come = reward_to_go(torch.where(mask, kl, 0), strict=True, discount=discount)
        tokens, mask, to_come = (
            values.view(-1, group_size, values.shape[1]).transpose(1, 2).flatten(0, 1)
            for values in (tokens, mask, to_come)
        )
        any_left = mask.any(1)
        tokens, mask, to_come = (values[any_left].flatten() for values in (tokens, mask, to_come))
        self.observe(tokens[:, None], mask[:, None], to_come, group_size)

    def _cover(self, vocabulary: int) -> None:
        """Add tokens with the value 0 to the tables, up to this size of the vocabulary."""
        more = max(vocabulary - len(self._tables), 0)
        self._tables = torch.nn.functional.pad(self._tables, (0, 0, 0, more))
        if len(self._prior):
            self._prior = torch.nn.functional.pad(self._prior, (0, more))

    def fit(self, vocabulary: int | None = None) -> None:
        """Improve the tables on the observed completions.

        Args:
            vocabulary: Size of the vocabulary, V; None for a table that ends with the largest id observed.
        """
        if vocabulary is not None and self._window.vocabulary > vocabulary:
            problem = f"must exceed all token ids, got {vocabulary} and the id {self._window.vocabulary - 1}"
            raise ConfigurationError(problem, key="vocabulary_size")
        if vocabulary is not None and len(self._prior) not in (0, vocabulary):
            problem = f"holds token values of {len(self._prior)} tokens, but the vocabulary has {vocabulary}"
            raise ConfigurationError(problem, key="policy_path")
        if not len(self._window.lengths):
            return
        self._cover(vocabulary or self._window.vocabulary)
        vocabulary = len(self._tables)
        if self._errors.any():
            # The last of equal ones, which shrinks most
            self._chosen = len(self._errors) - 1 - int(self._errors.flip(0).argmin())
        counts = CentredCounts(self._window, vocabulary, self._group_size)
        start, priors = self._tables[:, :-1], torch.zeros(vocabulary, len(self._ridges), dtype=torch.float64)
        if len(self._prior):
            priors = torch.cat([priors, self._prior[:, None].expand_as(priors)], 1)
        ridges = self._ridges.repeat(priors.shape[1] // len(self._ridges))
        fitted = conjugate_gradients(counts, self._window.rewards, ridges, priors, start, self.iterations)
        self._tables = torch.cat([fitted, self._tables[:, -1:]], 1)

    def state_dict(self) -> dict[str, Any]:
        """The complete state, as plain tensors and numbers."""
        return {
            **self._window._asdict(),
            "tables": self._tables,
            "errors": self._errors,
            "chosen": self._chosen,
            "group_size": self._group_size,
            "prior": self._prior,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            ConfigurationError: If the state has another number of ridges.
        """
        ridges = (len(state["errors"]) - 1) // (2 if len(state["prior"]) else 1)
        if ridges != len(self._ridges):
            problem = f"has token values of {ridges} ridges, where the estimator has {len(self._ridges)}"
            raise ConfigurationError(problem, key="ckpt_path")
        self._window = Completions(*(state[name].cpu() for name in Completions._fields))
        self._tables, self._errors = state["tables"].cpu(), state["errors"].cpu()
        self._chosen, self._group_size = state["chosen"], state["group_size"]
        self._prior = state["prior"].cpu()
