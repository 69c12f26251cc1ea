"""Preference losses: a chosen and a rejected completion of the same prompt."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, sigmoid

from lit_klrb.errors import ConfigurationError

PreferenceLoss = Literal["sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down"]
# The losses that assume a share of the preferences to be swapped.
_WITH_LABEL_SMOOTHING = ("sigmoid", "robust")


class PreferenceStats(NamedTuple):
    """Implicit rewards of the chosen and the rejected completions, detached, shape [B] each."""

    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margin(self) -> Tensor:
        """Mean difference between the implicit rewards, a scalar."""
        return (self.chosen_rewards - self.rejected_rewards).mean()

    @property
    def accuracy(self) -> Tensor:
        """Proportion of pairs whose chosen completion has the larger implicit reward, a scalar."""
        return (self.chosen_rewards > self.rejected_rewards).float().mean()


def check_preference_loss(kind: str, beta: float, label_smoothing: float) -> None:
    """Check the settings of a preference loss.

    Raises:
        ConfigurationError: If a setting is out of range or does not apply to the loss.
    """
    if kind not in get_args(PreferenceLoss):
        raise ConfigurationError(
            f"must be one of {', '.join(get_args(PreferenceLoss))}, got {kind!r}", key="loss"
        )
    if not 0 < beta < math.inf:
        raise ConfigurationError(f"must be positive and finite, got {beta}", key="beta")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigurationError(
            f"must be at least 0 and below 0.5, got {label_smoothing}", key="label_smoothing"
        )
    if label_smoothing and kind not in _WITH_LABEL_SMOOTHING:
        raise ConfigurationError(f"must be 0 with {kind}, got {label_smoothing}", key="label_smoothing")


def preference_loss(
    chosen_log_ratio: Tensor,
    rejected_log_ratio: Tensor,
    *,
    beta: float,
    kind: PreferenceLoss = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, PreferenceStats]:
    """Preference loss on the log ratios of chosen and rejected completions, averaged over the B pairs.

    With c and r the implicit rewards beta · log p(y)/q(y) of chosen and rejected completion, m = c − r, σ the
    logistic function and ε the assumed share of swapped preferences (`label_smoothing`):

    - sigmoid: −(1−ε) log σ(m) − ε log σ(−m); DPO, and conservative DPO with ε > 0
    - robust: (−(1−ε) log σ(m) + ε log σ(−m)) / (1 − 2ε); unbiased for the loss on unswapped preferences
    - ipo: ((m − ½) / beta)²; keeps m finite for deterministic preferences
    - hinge: max(0, 1 − m)
    - apo_zero: 1 − σ(c) + σ(r); raises chosen and lowers rejected, for a policy worse than the chosen texts
    - apo_down: σ(c) + 1 − σ(m); lowers both, rejected more, for a policy better than the chosen texts

    Args:
        chosen_log_ratio: log p(y)/q(y) of each chosen completion, summed over its tokens, shape [B].
        rejected_log_ratio: The same for the rejected completions, shape [B].
        beta: Scale of the implicit reward, in reward per nat; positive.
        kind: Name of the loss.
        label_smoothing: ε, for sigmoid and robust.

    Returns:
        The scalar loss, and detached `PreferenceStats`.

    Raises:
        ConfigurationError: If a setting is out of range.

    Example:
        >>> loss, stats = preference_loss(torch.tensor([1.0]), torch.tensor([0.0]), beta=1.0)
        >>> round(loss.item(), 4), stats.accuracy.item()
        (0.3133, 1.0)

    Reference: Rafailov et al. (2023), arXiv:2305.18290, Eq. (7); Chowdhury et al. (2024), arXiv:2403.00409
    (robust); Azar et al. (2023), arXiv:2310.12036 (ipo); Zhao et al. (2023), arXiv:2305.10425 (hinge);
    D'Oosterlinck et al. (2024), arXiv:2408.06266 (apo).
    """
    check_preference_loss(kind, beta, label_smoothing)
    chosen, rejected = beta * chosen_log_ratio, beta * rejected_log_ratio
    margin = chosen - rejected
    right, wrong = -(1 - label_smoothing) * logsigmoid(margin), label_smoothing * logsigmoid(-margin)
    match kind:
        case "sigmoid":
            losses = right - wrong
        case "robust":
            losses = (right + wrong) / (1 - 2 * label_smoothing)
        case "ipo":
            losses = ((margin - 0.5) / beta).square()
        case "hinge":
            losses = torch.relu(1 - margin)
        case "apo_zero":
            losses = 1 - sigmoid(chosen) + sigmoid(rejected)
        case "apo_down":
            losses = sigmoid(chosen) + 1 - sigmoid(margin)
    return losses.mean(), PreferenceStats(chosen.detach(), rejected.detach())
