"""One process trains unless more are asked for, whatever the machine has, and the run says how many did."""

import json
import socket

import pytest
from lightning.pytorch.accelerators import CPUAccelerator
from runs import in_processes
from torch import distributed

from lit_klrb.cli.main import main

ALL = "; --trainer.devices 2 would use all devices, each on a batch of its own"


def test_a_machine_with_two_devices_trains_in_one_process_unless_asked(chain, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CPUAccelerator, "auto_device_count", staticmethod(lambda: 2))
    parts = ("--trainer.accumulate_grad_batches", "2", "--trainer.max_steps", "2")
    assert chain.run("fit", "sft", *parts, run=tmp_path / "run") == 0
    assert f"training in 1 process, 16 rows per step{ALL}\n" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["processes"], summary["rows_per_step"]) == (1, 16)


def beside_an_engine(argv):
    """A run in a process that is in a group of its own, as vLLM's engine is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    return main(argv)


def test_a_run_alone_is_told_nothing_of_other_processes(chain, tmp_path):
    argv = chain.commands.argv("fit", "sft", "--trainer.max_steps", "2", run=tmp_path / "run")
    in_processes(1, beside_an_engine, argv, tmp_path / "log")
    assert "wrote" in (tmp_path / "log").read_text()
    assert "sync_dist" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "started",
    [
        {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2"},
        {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"},
    ],
)
def test_processes_of_a_launcher_do_not_train_alone(chain, tmp_path, monkeypatch, capsys, started):
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert chain.run("fit", "sft", run=tmp_path / "run") == 2
    line = "error: trainer.devices: must give as many processes as the launcher started, 2, got 1"
    assert capsys.readouterr().err.splitlines() == [line]
    assert not (tmp_path / "run").exists()


def test_check_says_how_many_rows_a_step_has(chain, tmp_path, capsys):
    two = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    assert chain.run("check", "sft", run=tmp_path) == 0
    assert "time: 6 steps of 8 rows" in capsys.readouterr().out
    assert chain.run("check", "sft", *two, run=tmp_path) == 0
    assert "time: 6 steps of 2 x 8 rows" in capsys.readouterr().out
