"""The page of the sweep at 96 tokens has the numbers of its results."""

import numpy as np
import pytest
from pages import interval, number, page_of, sweep_of

FOLDER, CONTROL = "smollm2_length_96", "own-exact"


def outcomes(arm, key):
    return np.array([sweep_of(FOLDER).grid[arm, 0, replicate].final[key] for replicate in range(8)])


@pytest.mark.parametrize("arm", ["own-exact", "discount-annealed", "future-exact", "future-sampled"])
def test_each_row_of_the_table(arm):
    kl, tokens, control = outcomes(arm, "kl"), outcomes(arm, "length"), outcomes(CONTROL, "kl")
    cells = [interval(kl, digits=1), number(tokens.mean(), 1), number((kl / tokens).mean())]
    if arm != CONTROL:
        level = 1 - 0.05 / 3
        cells += [interval(kl - control, level, 1, "+"), interval(np.log(kl / control), level)]
    _, row = page_of(FOLDER).split(f"| {arm}, ")
    assert row.split(" | ", 1)[1].startswith(" | ".join(cells))
