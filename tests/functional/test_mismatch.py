"""Where policy and reference differ most, against loops over tokens."""

import math

import torch

from lit_klrb.functional import TokenStats
from lit_klrb.functional.mismatch import PARTS, mismatch


def test_the_shares_are_those_of_loops_over_tokens():
    generator = torch.Generator().manual_seed(0)
    lengths, width = [1, 7, 8, 13, 20], 20
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    q = -40 * torch.rand(5, width, generator=generator)
    kl = torch.rand(5, width, generator=generator)
    ended = torch.tensor([True, True, False, True, False])
    padded = [torch.where(mask, values, float("nan")) for values in (q, q, kl)]
    ids = torch.randint(3, (5, width), generator=generator)
    found = mismatch(TokenStats(*padded), mask, ended, ids).metrics()
    tokens = [(row, t) for row, length in enumerate(lengths) for t in range(length)]
    low = [place for place in tokens if q[place] < -20]
    total = sum(kl[place].item() for place in tokens)
    parts = [0.0] * PARTS
    for row, t in tokens:
        if lengths[row] >= 8:
            parts[4 * t // lengths[row]] += kl[row, t].item()
    expected = {
        "improbable": len(low) / len(tokens),
        "improbable_kl": sum(kl[place].item() for place in low) / total,
        "end_ref_prob": sum(q[row, lengths[row] - 1].exp().item() for row in (0, 1, 3)) / 3,
        **{f"kl_part_{i}": part / sum(parts) for i, part in enumerate(parts, 1)},
        "repeated": sum(ids[row, t].item() == ids[row, t - 2].item() for row, t in tokens if t > 1)
        / sum(t > 1 for _, t in tokens),
    }
    assert found.keys() == expected.keys()
    torch.testing.assert_close(torch.tensor([*found.values()]), torch.tensor([*expected.values()]))


def test_shares_of_nothing_are_nan():
    mask, zeros = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    mask[:, 2:] = False
    ended = torch.tensor([False, False])
    found = mismatch(TokenStats(zeros, zeros, kl=zeros), mask, ended, zeros.long()).metrics()
    assert found.pop("improbable") == 0
    assert all(math.isnan(share) for share in found.values())
