"""Total gradient variance on the way from the reference to the optimum, against both ends of the line."""

import pytest
from walk import ascent, variances, worlds

from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate

WORLDS = [pytest.param(reference, rewards, id=name) for name, reference, rewards in worlds()]
ESTIMATORS = (MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate)


@pytest.mark.parametrize(("reference", "rewards"), WORLDS)
def test_never_much_above_the_better_end_and_far_below_on_the_way(reference, rewards):
    ratios = {2: [], 4: []}  # by group size
    for policy in ascent(reference, rewards, (0.05, 0.5, 0.95, 1.0)):
        for group_size, found in ratios.items():
            *ends, ours = variances(policy, reference, rewards, group_size, 100, ESTIMATORS)
            found.append(ours / min(ends))
    for found in ratios.values():
        assert max(found) < 1.05
        assert max(found[:2]) < 0.7
