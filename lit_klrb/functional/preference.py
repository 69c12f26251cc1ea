"""Losses on pairs of completions of one prompt, one preferred to the other."""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid


class PreferenceStats(NamedTuple):
    """What a preference loss saw, detached: the implicit rewards [B] of chosen and rejected."""

    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margin(self) -> Tensor:
        """Mean difference of the implicit rewards, a scalar."""
        return (self.chosen_rewards - self.rejected_rewards).mean()

    @property
    def accuracy(self) -> Tensor:
        """Share of pairs whose chosen completion has the larger implicit reward, a scalar."""
        return (self.chosen_rewards > self.rejected_rewards).float().mean()


def dpo_loss(
    chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, *, beta: float
) -> tuple[Tensor, PreferenceStats]:
    """Direct preference optimisation: the negative log likelihood of the preferences.

    -log σ(beta · (log_ratio_chosen − log_ratio_rejected)), averaged over the B pairs; beta · log_ratio is
    the implicit reward, so its gradient raises the chosen completion above the rejected one.

    Args:
        chosen_log_ratio: log p(y)/q(y) of each chosen completion, summed over its tokens, [B].
        rejected_log_ratio: The same of the rejected ones, [B].
        beta: The inverse scale of the implicit reward, in 1/nats; positive.

    Returns:
        The scalar loss, and `PreferenceStats` (detached).

    Raises:
        ValueError: If beta is not positive.

    Example:
        >>> import torch
        >>> loss, stats = dpo_loss(torch.tensor([1.0]), torch.tensor([0.0]), beta=1.0)
        >>> round(loss.item(), 4), stats.accuracy.item()
        (0.3133, 1.0)

    Reference: Rafailov et al. (2023), arXiv:2305.18290, Eq. (7).
    """
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    chosen, rejected = beta * chosen_log_ratio, beta * rejected_log_ratio
    return -logsigmoid(chosen - rejected).mean(), PreferenceStats(chosen.detach(), rejected.detach())
