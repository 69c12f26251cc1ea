"""`make gpu-hour`: in order, within its budget, continued where it was cut; nothing without a GPU."""

import json

import pytest
import torch

from benchmarks.gpu_hour import __main__ as gpu_hour
from benchmarks.gpu_hour.__main__ import Results, Unit, in_order, main, measured, run

UNITS = [
    Unit("Steps", "sft", "step", ("sft",)),
    Unit("Largest model", "full, 0.6B", "largest", ("full", "0.6B"), "full"),
    Unit("Largest model", "full, 1.7B", "largest", ("full", "1.7B"), "full"),
    Unit("Largest model", "LoRA, 0.6B", "largest", ("LoRA", "0.6B"), "LoRA"),
]


@pytest.fixture
def calls(monkeypatch):
    """Measurements that answer at once; a full model of 0.6B does not fit."""
    made = []

    def answer(unit, seconds, small, log):
        made.append(unit.name)
        return {"fits": "full" not in unit.name, "seconds": 1.5}

    monkeypatch.setattr(gpu_hour, "measured", answer)
    return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_one_line_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "gpu-hour needs a GPU, and torch finds none on this machine: nothing was measured"
    ]
    assert not list(tmp_path.iterdir())


def test_results_are_written_as_they_come_and_a_second_call_continues(calls, tmp_path):
    results = Results(tmp_path, "commit")
    assert run(UNITS[:2], results, minutes=1, small=True)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["sft", "full, 0.6B"]
    assert "| sft | yes | 1.5 |" in (tmp_path / "page.md").read_text()
    assert run(UNITS, Results(tmp_path, "commit"), minutes=1, small=True)
    # Larger ones of a chain that did not fit are not tried
    assert calls == ["sft", "full, 0.6B", "LoRA, 0.6B"]


def test_other_code_measures_again(calls, tmp_path):
    for commit in ("one", "two"):
        run(UNITS[:1], Results(tmp_path, commit), minutes=1, small=True)
    assert calls == ["sft", "sft"]


def test_a_spent_budget_makes_nothing(calls, tmp_path):
    assert not run(UNITS, Results(tmp_path, "commit"), minutes=0.1, small=True)
    assert calls == []


def test_a_measurement_that_fails_is_an_error_of_its_row(tmp_path, monkeypatch):
    stand_in = tmp_path / "benchmarks" / "gpu_hour" / "measurements.py"  # loads no libraries
    stand_in.parent.mkdir(parents=True)
    for path in (stand_in, stand_in.with_name("__init__.py"), stand_in.parents[1] / "__init__.py"):
        path.write_text("raise ValueError('no memory')" * (path is stand_in))
    monkeypatch.chdir(tmp_path)
    result = measured(UNITS[0], 60, small=True, log=tmp_path / "x.log")
    assert result == {"error": "exit code 1: ValueError: no memory"}


def test_the_list_begins_with_the_tests_on_the_gpu_and_names_each_measurement_once():
    units = in_order()
    assert {unit.function for unit in units[: len(gpu_hour.TESTS)]} == {"tests"}
    assert len({(unit.part, unit.name) for unit in units}) == len(units)
