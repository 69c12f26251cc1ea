"""Which log-probability answers for which value, against which baseline, under which importance weight."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError

# Log ratios are cut here before `exp`: the square of the result still fits float32.
MAX_EXPONENT = 40.0

Credit = Literal["whole", "from_here", "after", "own"]


class ImportanceWeights(NamedTuple):
    """Ratios policy / behaviour of completion prefixes, detached, shape [B, T].

    Args:
        before: Up to the token before t: the weight of what is known when token t is drawn.
        through: Up to token t: the weight of what depends on token t as well.
        sequence: Of the whole completion, the same at every t.
    """

    before: Tensor
    through: Tensor
    sequence: Tensor


def importance_weights(log_ratio: Tensor, scope: Literal["none", "prefix", "sequence"]) -> ImportanceWeights:
    """Importance weights for completions drawn from a behaviour policy.

    Args:
        log_ratio: Current minus behaviour log-probability of each token, 0 outside the mask, shape [B, T].
        scope: "none": all weights 1; "prefix": products over the tokens that matter at t, no further;
            "sequence": the product over the completion everywhere.

    Returns:
        Detached weights; log weights are cut at `MAX_EXPONENT`.

    Example:
        >>> weights = importance_weights(torch.tensor([[2.0, 3.0]]).log(), "prefix")
        >>> [[round(w) for w in field[0].tolist()] for field in weights]
        [[1, 2], [2, 6], [6, 6]]
    """
    log_ratio = log_ratio.detach()
    if scope == "none":
        ones = torch.ones_like(log_ratio)
        return ImportanceWeights(ones, ones, ones)
    summed = log_ratio.cumsum(-1)
    through = summed.clamp(max=MAX_EXPONENT).exp()
    sequence = through[:, -1:].expand_as(through)
    if scope == "sequence":
        return ImportanceWeights(sequence, sequence, sequence)
    before = (summed - log_ratio).clamp(max=MAX_EXPONENT).exp()
    return ImportanceWeights(before, through, sequence)


def reward_to_go(values: Tensor, *, strict: bool = False) -> Tensor:
    """The sum of the values from each position on, the position itself left out if `strict`.

    Args:
        values: Per-token values, 0 outside the mask, shape [B, T].
        strict: Sum over s > t rather than s >= t.

    Returns:
        Shape [B, T]; 0 after the completion.

    Example:
        >>> reward_to_go(torch.tensor([[1.0, 2.0, 4.0]])).tolist()
        [[7.0, 6.0, 4.0]]
        >>> reward_to_go(torch.tensor([[1.0, 2.0, 4.0]]), strict=True).tolist()
        [[6.0, 4.0, 0.0]]
    """
    inclusive = values.flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(inclusive[:, 1:], (0, 1)) if strict else inclusive


def assign_credit(values: Tensor, credit: Credit, through: Tensor, own: Tensor) -> Tensor:
    """What the log-probability of each token is multiplied by.

    The value at s meets the score of token t under the importance weight of all they depend on: of the prefix
    through t if s <= t, of what the value itself depends on if s > t.

    Args:
        values: Per-token values, 0 outside the mask, shape [B, T].
        credit: The positions s whose values are summed at t: "whole" (all), "from_here" (s >= t), "after"
            (s > t), "own" (s = t).
        through: Importance weight of the prefix through t, shape [B, T].
        own: Importance weight of what `values` depends on at each position, shape [B, T].

    Returns:
        Shape [B, T]; after the completion 0, except for "whole", where the total is carried on.

    Example:
        >>> values, ones = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3)
        >>> assign_credit(values, "whole", ones, ones).tolist()
        [[7.0, 7.0, 7.0]]
        >>> assign_credit(values, "after", ones, ones).tolist()
        [[6.0, 4.0, 0.0]]
    """
    if credit == "own":
        return through * values
    after = reward_to_go(own * values, strict=True)
    if credit == "after":
        return after
    if credit == "from_here":
        return through * values + after
    return through * values.cumsum(-1) + after


def leave_one_out_baseline(values: Tensor, group_size: int) -> Tensor:
    """For each completion the mean over the other completions of its prompt.

    Args:
        values: Shape [B] or [B, T]; the completions of a prompt are adjacent. Averaged position by position.
        group_size: Completions per prompt.

    Returns:
        The shape of `values`; differentiable in them.

    Raises:
        ConfigurationError: If `group_size` is below 2 or does not divide B.

    Example:
        >>> leave_one_out_baseline(torch.tensor([1.0, 2.0, 6.0]), group_size=3).tolist()
        [4.0, 3.5, 1.5]

    Reference: Kool, van Hoof, Welling (2019), "Buy 4 REINFORCE samples, get a baseline for free".
    """
    if group_size < 2:
        raise ConfigurationError(f"group_size is {group_size}; a leave-one-out baseline needs at least 2")
    check_group_size(len(values), group_size)
    groups = values.reshape(-1, group_size, *values.shape[1:])
    return ((groups.sum(1, keepdim=True) - groups) / (group_size - 1)).flatten(0, 1)


def check_group_size(batch_size: int, group_size: int) -> None:
    """Raise unless the batch is made of whole groups.

    Raises:
        ConfigurationError: If `group_size` is not a positive divisor of `batch_size`.
    """
    if group_size < 1 or batch_size % group_size:
        raise ConfigurationError(
            f"group_size is {group_size}; a divisor of the {batch_size} sequences expected"
        )
