"""Trainers take turns, and the page of their times recomputes from what was kept."""

import json
from multiprocessing import get_context

import pytest

from benchmarks import step, step_table, turns
from benchmarks.__main__ import BENCHMARKS
from benchmarks.turns import take_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Quicker than new interpreters."""
    monkeypatch.setattr(turns, "get_context", lambda _: get_context("fork"))


def test_trainers_alternate_by_cycle_and_each_counts_its_own_time(tmp_path, monkeypatch):
    order, seconds = tmp_path / "order", iter(range(100))
    monkeypatch.setattr(turns, "now", lambda: next(seconds))  # each reading takes a second

    def training(name, steps):
        def train(clock, cycles):
            clock.begin()
            for _ in range(cycles * steps):
                with order.open("a") as file:
                    file.write(name)
                clock.tick(steps)
            return {name: 1.0}

        return train

    one, other = take_turns([training("a", 1), training("b", 2)], 3)
    assert order.read_text() == "abbabbabb"
    assert one.seconds == other.seconds == [1, 1, 1]
    assert (one.shares, other.shares) == ({"a": 1.0}, {"b": 1.0})
    assert one.megabytes >= 0


def test_a_trainer_that_fails_ends_the_comparison(capfd):
    def fails(clock, cycles):
        clock.begin()
        clock.tick(1)
        raise RuntimeError("out of memory")

    with pytest.raises(EOFError):
        take_turns([fails], 2)
    assert "out of memory" in capfd.readouterr().err


def test_what_is_kept_of_a_machine_is_a_column_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "FOLDER", tmp_path)
    monkeypatch.setattr(step, "processor", lambda: "Abacus (R) 9 beads")
    times = {"ours": [1.0, 2.0], "other": [4.0, 4.0], "peak": 2e9, "operations": 1e9, "products": 1.0}
    times |= {"precision": "32-true", "load": 0.5, "software": "torch 2", "shares": {"generate": 1.0}}
    step.store("rloo", times | {"megabytes": [7.0, 8.0]})
    assert [path.name for path in tmp_path.iterdir()] == ["abacus-r-9-beads.json"]
    lines = step_table.page(tmp_path).splitlines()
    assert "| fastest product of matrices, GFLOP/s, 32-true |  | 2 |" in lines
    assert "| RLOO, tiny GPT-2 | .40 | .38 (.25–.50) |" in lines
    assert "| SFT, tiny GPT-2 | .40 | – |" in lines
    assert "| RLOO, tiny GPT-2 | 1.5 | 4 | .38 (.25–.50) | 33% | 12% | 50% | 100% | 7 | 8 | 0.5 |" in lines
    monkeypatch.setattr(step, "processor", lambda: "Counting board")
    rounded = times | {"megabytes": [7.0, 8.0], "precision": "bf16-mixed"}
    step.store("smollm2-bf16", rounded)
    step.store("smollm2-lora", rounded | {"peak": 4e9})  # the machine's, of all works in a precision
    lines = step_table.page(tmp_path).splitlines()
    assert "| fastest product of matrices, GFLOP/s, bf16-mixed |  | – | 4 |" in lines
    row = "| 1.5 | 4 | .38 (.25–.50) | 17% | 6% | 25% | 100% | 7 | 8 | 0.5 |"
    assert f"| RLOO, SmolLM2, bfloat16 {row}" in lines


def test_the_page_recomputes_from_the_results_of_the_machines():
    assert step_table.page() in BENCHMARKS.read_text("utf-8")
    for path in step.FOLDER.glob("*.json"):
        works = json.loads(path.read_text("utf-8"))["works"]
        assert works.keys() <= step.WORKS.keys()
