"""Total gradient variance on the way from the reference to the optimum, against both ends of the line."""

import pytest
from walk import ascent, variances, worlds

from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate

WORLDS = [pytest.param(reference, rewards, id=name) for name, reference, rewards in worlds()]
ESTIMATORS = (MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate)


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize(("reference", "rewards"), WORLDS)
def test_never_much_above_the_better_end_and_far_below_on_the_way(reference, rewards, group_size):
    ratios = []
    for policy in ascent(reference, rewards, (0.05, 0.5, 0.95, 1.0)):
        *ends, ours = variances(policy, reference, rewards, group_size, 100, ESTIMATORS)
        ratios.append(ours / min(ends))
    assert max(ratios) < 1.05
    assert max(ratios[:2]) < 0.7
