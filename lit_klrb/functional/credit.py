"""Credit assignment: which per-token values multiply which token's score, with which importance weight."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# Log ratios are clamped to this before `exp`: the square of the result still fits into float32.
MAX_EXPONENT = 40.0

Credit = Literal["whole", "from_here", "after", "own"]
ImportanceScope = Literal["none", "token", "prefix", "sequence"]
BeyondCap = Literal["truncate", "mask"]


class RatioCap(NamedTuple):
    """A bound of importance weights, which biases what they weight and bounds its variance.

    The bias is at most E[(w - limit)+ |term|] if larger weights are truncated to the limit.

    Args:
        limit: The largest weight.
        beyond: "truncate" replaces larger weights by the limit, "mask" by 0.
    """

    limit: float
    beyond: BeyondCap = "truncate"

    def of(self, weights: Tensor) -> Tensor:
        """The bounded weights.

        Example:
            >>> weights = torch.tensor([0.5, 3.0])
            >>> RatioCap(2.0).of(weights).tolist(), RatioCap(2.0, "mask").of(weights).tolist()
            ([0.5, 2.0], [0.5, 0.0])

        Reference: Ionides (2008), "Truncated importance sampling".
        """
        return torch.where(weights > self.limit, self.limit if self.beyond == "truncate" else 0, weights)


class ImportanceWeights(NamedTuple):
    """Products of the ratios policy / behaviour over the tokens a value depends on, detached, shape [B, T].

    Args:
        before: For values known before token t is drawn.
        through: For values that depend on token t as well.
        sequence: For values that depend on the whole completion.
    """

    before: Tensor
    through: Tensor
    sequence: Tensor


def importance_weights(
    log_ratio: Tensor, scope: ImportanceScope, cap: RatioCap | None = None
) -> ImportanceWeights:
    """Importance weights for completions drawn from a behaviour policy.

    Args:
        log_ratio: Current minus behaviour log-probability of each token, 0 outside the mask, shape [B, T].
        scope: "none": all weights 1; "token": the ratio of token t alone, 1 for what is known before it;
            "prefix": the product over the tokens up to t; "sequence": the product over the whole completion,
            at every position.
        cap: Bounds the weights; None for unbounded ones.

    Returns:
        Detached weights; log weights are clamped to at most `MAX_EXPONENT`.

    Example:
        >>> weights = importance_weights(torch.tensor([[2.0, 3.0]]).log(), "prefix")
        >>> [[round(w) for w in field[0].tolist()] for field in weights]
        [[1, 2], [2, 6], [6, 6]]
    """
    log_ratio = log_ratio.detach()
    if scope == "none":
        ones = torch.ones_like(log_ratio)
        return ImportanceWeights(ones, ones, ones)

    def bounded(log_weight: Tensor) -> Tensor:
        weight = log_weight.clamp(max=MAX_EXPONENT).exp()
        return weight if cap is None else cap.of(weight)

    if scope == "token":
        own = bounded(log_ratio)
        return ImportanceWeights(torch.ones_like(own), own, own)
    summed = running_sum(log_ratio)
    through = bounded(summed)
    # Log ratios are 0 after the end, so the last column is the product over the completion
    sequence = through[:, -1:].expand_as(through)
    if scope == "sequence":
        return ImportanceWeights(sequence, sequence, sequence)
    return ImportanceWeights(bounded(summed - log_ratio), through, sequence)


def effective_share(weights: Tensor, mask: Tensor) -> Tensor:
    """The effective sample size of importance weights per completion, 0 to 1: 1 if all weights are equal.

    At each position it is (sum w)^2 / sum w^2 over the completions that have a token there; the sum of these
    is divided by the number of tokens.

    Args:
        weights: Importance weights, shape [B, T].
        mask: True on completion tokens, shape [B, T].

    Returns:
        A scalar; NaN without tokens.

    Example:
        >>> effective_share(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1) > 0).item()
        0.800000011920929

    Reference: Kish (1965), "Survey Sampling".
    """
    weights = torch.where(mask, weights, 0)
    squares = weights.square().sum(0)
    sizes = torch.where(squares > 0, weights.sum(0).square() / squares, 0)
    return sizes.sum() / mask.sum()


def weighted(weights: Tensor | float, values: Tensor) -> Tensor:
    """The product of weights and values; 0 where the weight is 0, even for a value that is not finite.

    Example:
        >>> weighted(torch.tensor([0.0, 2.0]), torch.tensor([torch.inf, 3.0])).tolist()
        [0.0, 6.0]
    """
    if not isinstance(weights, Tensor):
        return weights * values if weights else torch.zeros_like(values)
    return torch.where(weights == 0, 0, weights * values)


def running_sum(values: Tensor) -> Tensor:
    """Cumulative sums over the last dimension, in the same order on every call.

    On a GPU torch's own cumulative sums vary in their last digits, and are refused where it was asked to be
    deterministic.

    Args:
        values: Shape [..., T].
    """
    return _sums_by_product(values) if values.is_cuda else values.cumsum(-1)


def _sums_by_product(values: Tensor) -> Tensor:
    """Cumulative sums as a product with a triangle of ones, in float64."""
    ones = torch.ones(2 * values.shape[-1:], dtype=torch.float64, device=values.device)
    infinite = values.isinf()
    sums = values.masked_fill(infinite, 0).double() @ ones.triu()
    # Infinities would give 0 * inf = NaN in front of them; maxima and minima are the same in every order
    infinities = torch.where(infinite, values, 0)
    largest, lowest = infinities.cummax(-1).values, infinities.cummin(-1).values
    return (sums + largest.clamp(min=0) + lowest.clamp(max=0)).to(values.dtype)


def reward_to_go(values: Tensor, *, strict: bool = False, discount: float = 1.0) -> Tensor:
    """Sum of discount^(s - t) times the value at s, from each position t to the end.

    Args:
        values: Per-token values, 0 outside the mask, shape [B, T].
        strict: Sum over s > t rather than s >= t.
        discount: Factor per token of distance, 0 to 1.

    Returns:
        Shape [B, T]; 0 after the end of the completion.

    Example:
        >>> reward_to_go(torch.tensor([[1.0, 2.0, 4.0]])).tolist()
        [[7.0, 6.0, 4.0]]
        >>> reward_to_go(torch.tensor([[1.0, 2.0, 4.0]]), strict=True).tolist()
        [[6.0, 4.0, 0.0]]
        >>> reward_to_go(torch.tensor([[1.0, 2.0, 4.0]]), discount=0.5).tolist()
        [[3.0, 4.0, 4.0]]
    """
    if discount == 1 or not values.shape[-1]:
        inclusive = running_sum(values.flip(-1)).flip(-1)  # a cumulative sum from the right
    else:
        sums = [values[:, -1]]
        for column in values[:, :-1].flip(-1).unbind(-1):
            sums.append(column + weighted(discount, sums[-1]))
        inclusive = torch.stack(sums[::-1], -1)
    return weighted(discount, torch.nn.functional.pad(inclusive, (0, 1))[:, 1:]) if strict else inclusive


def assign_credit(
    values: Tensor, credit: Credit, through: Tensor, own: Tensor, discount: float = 1.0
) -> Tensor:
    """Sum of the values credited to each token: the factor of that token's log-probability in the loss.

    The product of the value at s and the score of token t carries the importance weight of every token that
    either depends on: the weight of the prefix through t if s <= t, the value's own weight if s > t.

    Args:
        values: Per-token values, 0 outside the mask, shape [B, T].
        credit: The positions s whose values are summed at t: "whole" (all), "from_here" (s >= t), "after"
            (s > t), "own" (s = t).
        through: Importance weight of the prefix through t, shape [B, T].
        own: Importance weight of the tokens that `values` depends on at each position, shape [B, T].
        discount: Factor of the value at s > t per token of distance.

    Returns:
        Shape [B, T]; 0 after the end of the completion, except for "whole", which repeats the total.

    Example:
        >>> values, ones = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3)
        >>> assign_credit(values, "whole", ones, ones).tolist()
        [[7.0, 7.0, 7.0]]
        >>> assign_credit(values, "after", ones, ones).tolist()
        [[6.0, 4.0, 0.0]]
    """
    if credit == "own":
        return weighted(through, values)
    after = reward_to_go(weighted(own, values), strict=True, discount=discount)
    if credit == "after":
        return after
    if credit == "from_here":
        return weighted(through, values) + after
    # "whole": values up to t under the weight of the prefix, later ones under their own
    return weighted(through, running_sum(values)) + after
