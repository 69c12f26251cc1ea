"""Cells as jobs of SLURM, with stand-ins for its commands: the same results as with the local launcher."""

import os
import re
import shutil
import signal
import sys

import pytest
from sweep_project import HERE, wait_until

from analysis.sweep.job import FAILED, MISPLACED, Job
from analysis.sweep.launchers import Options, launcher, slurm
from analysis.sweep.launchers.slurm import SlurmLauncher
from lit_klrb.errors import ConfigurationError

GRID = {"replicates": 1, "beta": {0: 0.1}}
SLURM = ("--launcher", "slurm")


@pytest.fixture
def cluster(project, monkeypatch):
    """A folder with the commands, in front of the PATH of the project's commands, which ask them often."""
    folder = project.directory / "bin"
    folder.mkdir()
    source = f"#!{sys.executable} -IS\n" + (HERE / "fake_slurm.py").read_text()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)
    project.environment |= {"PATH": os.pathsep.join([str(folder), os.environ["PATH"]])}
    monkeypatch.setattr(slurm, "LOOK", 0.05)
    monkeypatch.setattr(slurm, "ASK", 0.2)
    return folder


def test_slurm_publishes_what_the_local_launcher_publishes_even_if_a_job_is_lost(project, cluster):
    (cluster / "lost").touch()
    reference = project.write("reference", grid=GRID, dpo_threads=2, rloo={"padding": "x" * 200_000})
    assert project.run("sweep", "--config", reference)[0] == 0
    options = (*SLURM, "--workers", 2, "--slurm", "--partition=short --mem=1G")
    plan = project.write(grid=GRID, dpo_threads=2, rloo={"padding": "x" * 200_000}, gpus=2)
    code, output = project.run("sweep", "--config", plan, *options)
    assert code == 0, output
    assert "ended without a result started slurmstepd: killed" in output
    assert project.results() == project.results("reference")
    submitted = (cluster / "submitted").read_text().splitlines()
    assert len(submitted) == 5
    for stage, threads in (("sft", 1), ("dpo", 2), ("rloo", 1)):
        ends = {line.partition("--cpus-per-task=")[2] for line in submitted if f"--job-name={stage}" in line}
        assert ends == {f"{threads}{' --gpus=2' * (stage == 'rloo')} --partition=short --mem=1G"}
    # SLURM would start a job again that the coordinator has submitted again
    assert all("--no-requeue" in line.split() for line in submitted)
    assert not (project.directory / "plan" / slurm.FOLDER).exists()


def test_a_stop_saves_and_the_next_sweep_resumes(project, cluster):
    plan = project.write(rloo={"waits": True}, grid=GRID)
    process = project.start("sweep", "--config", plan, *SLURM)
    wait_until(lambda: len(project.ran()) == 4)
    os.kill(process.pid, signal.SIGTERM)
    code, output = process.ended()
    assert code == 143, output
    assert len(project.results()) == 2
    code, output = project.run("sweep", "--config", plan, *SLURM)
    assert code == 0, output
    logs = [path.read_text() for path in project.directory.glob("plan/cells/*/log.txt")]
    assert sum("resumed" in log for log in logs) == 2


@pytest.mark.parametrize(
    ("unfit", "reason"),
    {
        "exec /no/python": "two cannot start cells: .*not found",
        'rm "$OUTPUT"; exit 1': "two cannot start cells: it writes nothing to .*",
    }.items(),
    ids=["package", "folder"],
)
def test_a_node_that_cannot_start_a_job_gets_no_more(project, cluster, monkeypatch, cells, unfit, reason):
    monkeypatch.setenv("PATH", project.environment["PATH"])
    (cluster / "unfit").write_text(f"{unfit}\n")
    launched = SlurmLauncher(Options(None, 1, "fake_job", project.directory))
    launched.submit(Job(cells[0], project.directory, "fake_job", False))
    (ended,) = launched.wait(60)
    assert ended.code == MISPLACED
    assert re.fullmatch(reason, ended.reason)
    launched.submit(Job(cells[1], project.directory, "fake_job", False))
    launched.stop()
    submitted = (cluster / "submitted").read_text().splitlines()
    assert ["--exclude=two" in line for line in submitted] == [False, True]


def test_a_node_with_other_software_is_named_once_and_costs_no_attempt(project, cluster):
    (project.directory / "other").mkdir()
    (project.directory / "other" / "fake_job.py").write_text("")
    (cluster / "unfit").write_text("export PYTHONPATH=other:$PYTHONPATH\n")
    code, output = project.run("sweep", "--config", project.write(grid=GRID), *SLURM)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if "run elsewhere" in line]
    assert re.fullmatch(".* has other software than .*: code .*; its cells run elsewhere", line)
    assert "run again" not in output
    submitted = (cluster / "submitted").read_text().splitlines()
    assert ["--exclude=two" in line for line in submitted] == [False, True, True, True, True]


def test_an_odd_file_in_place_of_an_exit_code_is_one_line(tmp_path):
    for content in ("", "soon", "x y z", "1.5 one "):
        (tmp_path / "exit").write_text(content)
        assert slurm._exit_of(tmp_path / "exit")[0] == FAILED
        assert slurm._exit_of(tmp_path / "exit")[2] == f"{tmp_path / 'exit'} holds no exit code"
    (tmp_path / "exit").write_text("143 one a b")
    assert slurm._exit_of(tmp_path / "exit") == (143, "one", "a b")


def test_what_cannot_be_is_refused_in_one_line(monkeypatch, tmp_path, project):
    monkeypatch.setattr(shutil, "which", str)
    with pytest.raises(ConfigurationError, match="--slurm: --comment='one are no options: No closing quot"):
        SlurmLauncher(Options(None, 1, "fake_job", tmp_path, slurm="--comment='one"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigurationError, match="needs sbatch, which is not on this machine"):
        launcher("slurm")(Options(None, 1, "fake_job", tmp_path))
    with pytest.raises(ConfigurationError, match="--launcher none: one of local, ray, slurm expected"):
        launcher("none")
    for option, needed in {"--slurm=--mem=1G": "slurm", "--address=auto": "ray"}.items():
        code, output = project.run("sweep", "--config", project.write(), option)
        message = f"error: {option.replace('=', ' ', 1)} needs --launcher {needed}"
        assert (code, output.splitlines()[-1]) == (2, message)
