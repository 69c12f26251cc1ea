"""Score weights against the definitions, term by term: an expectation misses needless zero-mean terms."""

import pytest
import torch
from enumerated import Case

from lit_klrb import estimators
from lit_klrb.functional import TokenStats

CASE = Case.random(contexts=2, vocab_size=3, max_length=4, seed=5)
ROWS = torch.tensor([0, 7, 19, 30, 12, 4])


def k3(r):
    return r + (-r).exp() - 1


# Score weight of token t from the log ratios r and exact KLs k of one completion.
DEFINITIONS = {
    "MonteCarlo": lambda r, k, t: r.sum(),
    "MonteCarloRewardToGo": lambda r, k, t: r[t:].sum(),
    "RaoBlackwell": lambda r, k, t: k[t + 1 :].sum(),
    "RaoBlackwellSequence": lambda r, k, t: k.sum(),
    "RaoBlackwellLite": lambda r, k, t: r[t] - k[t] + k[t + 1 :].sum(),
    "ReleasedMonteCarlo": lambda r, k, t: r.sum(),
    "ReleasedRaoBlackwell": lambda r, k, t: k.sum(),
    "K3Reward": lambda r, k, t: k3(r).sum(),
    "RaoBlackwellReward": lambda r, k, t: k.sum(),
    **dict.fromkeys(
        ["K1Loss", "K2Loss", "K3Loss", "K3LossSequence", "RaoBlackwellLoss", "NoKL"],
        lambda r, k, t: torch.zeros(()),
    ),
}
WHOLE_SEQUENCE = {
    "MonteCarlo",
    "RaoBlackwellSequence",
    "ReleasedMonteCarlo",
    "ReleasedRaoBlackwell",
    "K3Reward",
    "RaoBlackwellReward",
}


@pytest.mark.parametrize("baseline", [None, "leave_one_out"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_score_weights_are_the_definitions_and_zero_outside_the_mask(name, baseline):
    mask = CASE.sequences[1][ROWS]
    stats = TokenStats(*(field[ROWS] for field in CASE.stats(CASE.policy.logits)))
    alone = torch.zeros(mask.shape, dtype=torch.float64)
    for row, length in enumerate(mask.sum(1).tolist()):
        r = (stats.logprobs - stats.ref_logprobs)[row, :length]
        for t in range(length):
            alone[row, t] = DEFINITIONS[name](r, stats.kl[row, :length], t)
    if name in WHOLE_SEQUENCE:
        # Every position's, those after the end included: the baseline is the ordinary one of RLOO.
        alone = alone[:, :1].expand_as(alone)
    expected = alone.clone()
    if baseline is not None:
        for row in range(len(ROWS)):
            group = [other for other in range(row // 3 * 3, row // 3 * 3 + 3) if other != row]
            expected[row] -= alone[group].mean(0)
    weights = getattr(estimators, name)(baseline=baseline).weights(stats, mask, group_size=3)
    assert torch.allclose(weights, torch.where(mask, expected, 0), rtol=0, atol=1e-12)
    assert not weights[~mask].any()
