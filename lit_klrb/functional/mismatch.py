"""Where a policy and its reference differ most: improbable tokens, ends, repetitions, and positions."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.functional.logprobs import TokenStats
from lit_klrb.functional.topk import kl_known

# Tokens with a lower log-probability under the reference are improbable.
IMPROBABLE = -20.0
# Parts of equal length into which completions are divided, and the shortest that are.
PARTS, SHORTEST = 4, 8


class Mismatch(NamedTuple):
    """Sums over each completion, shape [B] unless stated otherwise."""

    tokens: Tensor  # number of tokens
    improbable: Tensor  # number of tokens with log q(y_t) below `IMPROBABLE`
    kl: Tensor  # KL of all tokens, in nats
    improbable_kl: Tensor  # KL of the improbable tokens
    ended: Tensor  # 1 if the completion ended, 0 if it was truncated
    end_prob: Tensor  # probability of its end token under the reference if it ended, else 0
    # KL of the first to the last quarter of the completion, shape [B, 4]; 0 for those with fewer than
    # `SHORTEST` tokens
    part_kl: Tensor
    places: Tensor  # number of tokens with two others before them
    # Of these, the number that equal the token two places before, as in repetitions of one token or of two
    repeated: Tensor

    def metrics(self) -> dict[str, float]:
        """Shares over all completions.

        Returns:
            `improbable`: share of the tokens. `improbable_kl`: their share of the KL. `end_ref_prob`: mean
            probability of the end under the reference, of those that ended. `kl_part_1` to `kl_part_4`:
            shares of the KL. `repeated`: share of the tokens that equal the one two places before. A share of
            nothing is NaN.
        """
        parts = self.part_kl.sum(0)
        shares = {
            "improbable": self.improbable.sum() / self.tokens.sum(),
            "improbable_kl": self.improbable_kl.sum() / self.kl.sum(),
            "end_ref_prob": self.end_prob.sum() / self.ended.sum(),
            **{f"kl_part_{i}": part / parts.sum() for i, part in enumerate(parts, 1)},
            "repeated": self.repeated.sum() / self.places.sum(),
        }
        return {name: share.item() for name, share in shares.items()}


def mismatch(stats: TokenStats, mask: Tensor, ended: Tensor, tokens: Tensor) -> Mismatch:
    """The sums of each completion.

    Args:
        stats: Statistics with the exact KL or a head, shape [B, T].
        mask: True on completion tokens, at the beginning of each row, shape [B, T].
        ended: Whether a completion ended rather than was truncated, shape [B].
        tokens: Token ids of the completions, shape [B, T].

    Example:
        >>> logprobs, mask = torch.tensor([[-1.0, -30.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool)
        >>> stats, ended = TokenStats(logprobs, logprobs, kl=-logprobs), torch.tensor([True])
        >>> shares = mismatch(stats, mask, ended, torch.tensor([[7, 8, 7]])).metrics()
        >>> [round(shares[name], 2) for name in ("improbable", "improbable_kl", "end_ref_prob", "repeated")]
        [0.33, 0.94, 0.37, 1.0]
    """
    stats = stats.masked(mask)
    kl = torch.where(mask, kl_known(stats), 0)
    improbable = (stats.ref_logprobs < IMPROBABLE) & mask
    lengths = mask.sum(1)
    last = stats.ref_logprobs.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
    part = PARTS * torch.arange(mask.shape[1], device=mask.device) // lengths.clamp(min=1)[:, None]
    long_kl = torch.where((lengths >= SHORTEST)[:, None], kl, 0)
    return Mismatch(
        tokens=lengths.float(),
        improbable=improbable.sum(1).float(),
        kl=kl.sum(1),
        improbable_kl=torch.where(improbable, kl, 0).sum(1),
        ended=ended.float(),
        end_prob=torch.where(ended, last.exp(), 0),
        part_kl=torch.stack([torch.where(part == i, long_kl, 0).sum(1) for i in range(PARTS)], 1),
        places=mask[:, 2:].sum(1).float(),
        repeated=(mask[:, 2:] & (tokens[:, 2:] == tokens[:, :-2])).sum(1).float(),
    )
