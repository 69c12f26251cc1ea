"""Score weights against their definitions, as expectations do not show superfluous zero-mean terms."""

import pytest
import torch
from definitions import DEFINITIONS, score_weights
from enumerated import Case

from lit_klrb import estimators

CASE = Case.random(contexts=2, vocab_size=3, max_length=4, seed=5)
ROWS = torch.tensor([0, 7, 19, 30, 12, 4])


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("baseline", [None, "leave_one_out"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_score_weights_equal_their_definitions_and_are_zero_outside_the_mask(name, baseline, group_size):
    mask = CASE.sequences[1][ROWS]
    stats = CASE.stats(CASE.policy.logits).map(lambda field: field[ROWS])
    expected = score_weights(name, stats.logprobs - stats.ref_logprobs, stats.kl, mask, group_size, baseline)
    weights = getattr(estimators, name)(baseline=baseline).weights(stats, mask, group_size=group_size).score
    assert torch.allclose(weights, expected, rtol=0, atol=1e-12)
    assert not weights[~mask].any()
