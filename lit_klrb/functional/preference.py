"""Preference losses: a chosen and a rejected completion of the same prompt."""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid


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


def preference_loss(
    chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, *, beta: float
) -> tuple[Tensor, PreferenceStats]:
    """The loss of direct preference optimisation, averaged over the B pairs: −log σ(c − r).

    c and r are the implicit rewards beta · log p(y)/q(y) of the chosen and the rejected completion, and σ is
    the logistic function.

    Args:
        chosen_log_ratio: log p(y)/q(y) of each chosen completion, summed over its tokens, shape [B].
        rejected_log_ratio: The same for the rejected completions, shape [B].
        beta: Scale of the implicit reward, in reward per nat; positive.

    Returns:
        The scalar loss, and detached `PreferenceStats`.

    Example:
        >>> import torch
        >>> loss, stats = preference_loss(torch.tensor([1.0]), torch.tensor([0.0]), beta=1.0)
        >>> round(loss.item(), 4), stats.accuracy.item()
        (0.3133, 1.0)

    Reference: Rafailov et al. (2023), arXiv:2305.18290, Eq. (7).
    """
    chosen, rejected = beta * chosen_log_ratio, beta * rejected_log_ratio
    losses = -logsigmoid(chosen - rejected)
    return losses.mean(), PreferenceStats(chosen.detach(), rejected.detach())
