"""The pages of the learned reward on SmolLM2 have the numbers of their results."""

import json

import numpy as np
import pytest
from pages import RESULTS, by_start, interval, number, page_of, sweep_of

FOLDER, ALONE = "smollm2_learned", "smollm2_learned_default"
ARMS = ("mc", "mc-three", "prefix-one", "prefix-two", "prefix-four", "vine-two")


@pytest.mark.parametrize(
    ("folder", "control", "arm"),
    [
        *((FOLDER, "mc", arm) for arm in ARMS),
        *((ALONE, "default", arm) for arm in ("default", "prefix-four")),
    ],
)
def test_each_row_of_the_table(folder, control, arm):
    sweep = sweep_of(folder)
    runs = [sweep.grid[arm, 0, replicate] for replicate in range(8)]
    reward, kl = (np.array([run.outcome(key) for run in runs]) for key in ("reward", "kl"))
    seconds = np.median([sweep.seconds[run.cell.id] for run in runs if run.cell.id in sweep.seconds])
    cells = [arm, *map(interval, (reward, kl, reward - 0.1 * kl)), f"{seconds:.0f}"]
    comparisons = json.loads((RESULTS / folder / "results.json").read_text())["comparisons"]
    for planned in (one["objective"] for one in comparisons if one["treatment"] == arm):
        starts = by_start(folder, arm, control)
        cells += [interval(starts, planned["level"]), f"{planned['p_adjusted']:.2g}"]
        cells += [", ".join(map(number, starts))]
    assert f"| {' | '.join(cells)} |" in page_of(folder)


@pytest.mark.parametrize("control", ["mc-three", "vine-two"])
def test_what_the_plan_did_not_ask(control):
    told = f"prefix-two minus {control} {interval(by_start(FOLDER, 'prefix-two', control))}"
    assert told in page_of(FOLDER)
