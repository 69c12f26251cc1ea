"""Cells get GPUs and processes of their own; GPUs are declared, none is needed."""

import json
from dataclasses import replace

import pytest

from analysis.design import expand, read_plan
from analysis.design.resources import gpus_of, processes_of, visible_gpus
from analysis.sweep.launchers import Options
from analysis.sweep.launchers.local import LocalLauncher
from lit_klrb.errors import ConfigurationError


def test_each_cell_of_a_local_sweep_sees_one_gpu_that_no_other_has(project):
    plan = project.write(gpus=1, rloo={"seconds": 0.3}, sft={"trainer": {"accelerator": "cpu"}})
    four = ("--workers", 4)  # of which two wait
    code, output = project.run("sweep", "--config", plan, *four, CUDA_VISIBLE_DEVICES="4,GPU-6f")
    assert code == 0, output
    assert "run again" not in output  # a cell fails if another one has its GPU
    found = project.gpus()
    assert (found["sft"], found["dpo"]) == ({"": 1}, {"4": 1})
    assert found["rloo"].keys() == {"4", "GPU-6f"}
    assert found["rloo"].total() == 8


def test_gpus_are_in_no_id_and_in_no_locked_plan(project, cells):
    found = expand(read_plan(project.write(gpus=1))).cells
    assert [cell.id for cell in found] == [cell.id for cell in cells]
    assert "gpus" not in json.dumps(read_plan(project.directory / "plan.yaml").record())


def test_more_gpus_than_this_machine_has_are_refused_before_a_cell_runs(project):
    code, output = project.run("sweep", "--config", project.write(gpus=3), CUDA_VISIBLE_DEVICES="0,1")
    assert code == 2
    message = "error: gpus: a cell gets 3, and this machine has 2; CUDA_VISIBLE_DEVICES can name others"
    assert output.splitlines()[-1] == message
    assert project.ran() == []


@pytest.mark.parametrize(
    ("declared", "gpus", "processes", "slots"),
    [("0,1,2,3", 1, 1, 4), ("0,1,2,3", 2, 1, 2), ("", 0, 1, 4), ("0", 0, 2, 2)],
)
def test_as_many_cells_run_at_a_time_as_there_are_gpus_or_cores_for(
    project, monkeypatch, declared, gpus, processes, slots
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", declared)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(4)})
    options = Options(None, 1, "fake_job", project.directory, processes, gpus)
    assert LocalLauncher.of(options).slots == slots


@pytest.mark.parametrize(
    ("declared", "names"),
    [("", []), ("0,2", ["0", "2"]), ("1,-1,0", ["1"]), ("MIG-a/1/0", ["MIG-a/1/0"]), ("-1", [])],
)
def test_declared_gpus(monkeypatch, declared, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", declared)
    assert visible_gpus() == names


@pytest.mark.parametrize(
    ("trainer", "overrides", "declared", "expected"),
    [
        ({}, {}, "0,1", (1, 1)),
        ({}, {}, "", (1, 0)),
        ({"accelerator": "gpu"}, {}, "", (1, 1)),
        ({"accelerator": "cpu"}, {}, "0,1", (1, 0)),
        ({"accelerator": "gpu", "devices": 2}, {}, "", (2, 2)),
        ({"accelerator": "gpu", "devices": [0, 1, 3]}, {}, "", (3, 3)),
        ({"devices": "0,1"}, {"trainer.accelerator": "cpu"}, "0,1", (2, 0)),
        ({}, {"trainer.devices": 2}, "0,1", (2, 2)),
    ],
)
def test_a_process_that_trains_on_gpus_gets_one(
    project, cells, monkeypatch, trainer, overrides, declared, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", declared)
    cell = replace(cells[-1], config={"trainer": trainer}, overrides=overrides)
    plan = read_plan(project.directory / "plan.yaml")
    assert (processes_of(cell), gpus_of(plan, cell)) == expected


def test_processes_are_part_of_a_cells_identity_and_never_the_machines_choice(project, cells):
    def ids(**trainer):
        return {cell.id for cell in expand(read_plan(project.write(rloo={"trainer": trainer}))).cells[2:]}

    assert not ids(devices=1) & ids(devices=2)
    for devices in ("auto", -1):
        with pytest.raises(ConfigurationError, match=f"stages.rloo: trainer.devices: {devices!r} is not"):
            ids(devices=devices)
    with pytest.raises(ConfigurationError, match=r"trainer\.devices: 'many' is no number"):
        ids(devices="many")
