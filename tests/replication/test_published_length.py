"""The page of the sweep at 96 tokens: its table, recomputed from the runs."""

import numpy as np
import pytest
from pages import page_of, sweep_of

from analysis.stats.intervals import Estimate

FOLDER, CONTROL = "smollm2_length_96", "own-exact"


def text(value, digits, sign=False):
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def interval(values, digits, level=0.95, sign=False):
    found = Estimate.of_mean(values).interval(level)
    return f"{text(values.mean(), digits, sign)} ({text(found.low, digits)} to {text(found.high, digits)})"


@pytest.mark.parametrize("arm", ["own-exact", "discount-annealed", "future-exact", "future-sampled"])
def test_the_table_at_96_tokens_is_that_of_the_runs(arm):
    grid = sweep_of(FOLDER).grid
    values = {
        (name, key): np.array([grid[name, 0, replicate].final[key] for replicate in range(8)])
        for name in (arm, CONTROL)
        for key in ("kl", "length")
    }
    kl, tokens, control = values[arm, "kl"], values[arm, "length"], values[CONTROL, "kl"]
    cells = [interval(kl, 1), text(tokens.mean(), 1), text((kl / tokens).mean(), 2)]
    if arm != CONTROL:
        level = 1 - 0.05 / 3
        cells += [interval(kl - control, 1, level, sign=True), interval(np.log(kl / control), 2, level)]
    _, row = page_of(FOLDER).split(f"| {arm}, ")
    assert row.split(" | ", 1)[1].startswith(" | ".join(cells))
