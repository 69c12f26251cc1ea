"""Cells as Ray tasks: the same results as with the local launcher, even if a node or the driver fails."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest
from sweep_project import HERE, kill_session, session, wait_until

import analysis

pytest.importorskip("ray")

# Ray's servers take seconds to start and print warnings.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_ray_publishes_what_the_local_launcher_publishes(project):
    assert project.run("sweep", "--config", project.write("reference"))[0] == 0
    code, output = project.run("sweep", "--config", project.write(), "--launcher", "ray", "--workers", 2)
    assert code == 0, output
    assert "10 cells: 10 done; 10 run now" in output
    assert project.results() == project.results("reference")


def test_each_cell_sees_one_of_two_declared_gpus(project):
    plan = project.write(gpus=1, rloo={"seconds": 0.3}, sft={"trainer": {"accelerator": "cpu"}})
    code, output = project.run(
        *("sweep", "--config", plan, "--launcher", "ray", "--workers", 4), CUDA_VISIBLE_DEVICES="0,1"
    )
    assert code == 0, output
    assert "run again" not in output  # a cell fails if another one has its GPU
    found = project.gpus()
    assert (found["sft"], found["rloo"].keys()) == ({"": 1}, {"0", "1"})


def test_a_stop_kills_the_cells_and_the_next_sweep_completes_them(project):
    rloo = {"seconds": 0.6}
    assert project.run("sweep", "--config", project.write("reference", rloo=rloo))[0] == 0
    plan = project.write(rloo=rloo)
    process = project.start("sweep", "--config", plan, "--launcher", "ray", "--workers", 2)
    wait_until(lambda: len(project.ran()) >= 4, seconds=120)
    os.kill(process.pid, signal.SIGTERM)
    code, output = process.ended(120)
    assert code == 143, output
    wait_until(lambda: not session(process.pid))
    # Cells that were running have no result.
    assert len(project.results()) < len({*project.ran()})
    assert project.run("sweep", "--config", plan)[0] == 0
    assert project.results() == project.results("reference")


RLOO, GRID = {"seconds": 0.3}, {"replicates": 6}


@pytest.fixture
def reference(project):
    assert project.run("sweep", "--config", project.write("reference", rloo=RLOO, grid=GRID))[0] == 0
    return project.results("reference")


@contextmanager
def cluster(project, mount=""):
    """A cluster's process, and the arguments of a sweep on it."""
    plan = project.write(rloo=RLOO, grid=GRID)
    (project.directory / "plan").mkdir()
    with subprocess.Popen(
        [sys.executable, HERE / "ray_cluster.py", *filter(None, [mount])],
        # Nodes run the sweep's code: it must be found there as it is here.
        env=project.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        line = next(line for line in process.stdout if line.startswith("address"))
        yield process, ("sweep", "--config", plan, "--launcher", "ray", "--address", line.split()[1])
        process.stdin.close()


def ended(process):
    code, output = process.ended(300)
    print(output)
    assert code == 0
    return output


def test_a_node_lost_in_the_middle_changes_nothing(project, reference):
    with cluster(project) as (nodes, sweep):
        process = project.start(*sweep)
        wait_until(lambda: len({*project.ran()}) >= 6, seconds=120)
        nodes.stdin.write("lose a node\n")
        nodes.stdin.flush()
        ended(process)
    assert project.results() == reference


def test_a_killed_driver_is_followed_by_the_same_command(project, reference):
    with cluster(project) as (_, sweep):
        process = project.start(*sweep)
        results = project.directory / "plan" / "results"
        wait_until(lambda: results.exists() and len(list(results.glob("*.json"))) >= 6, seconds=120)
        kill_session(process)
        finished = {path.stem for path in results.glob("*.json")}
        ended(project.start(*sweep))
    assert project.results() == reference
    assert all(project.ran().count(cell) == 1 for cell in finished)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs mounts that one process sees")
@pytest.mark.parametrize("other", ["folder", "package", "version"])
def test_a_node_of_another_kind_is_given_no_cells(project, reference, tmp_path, other):
    hidden = {"folder": tmp_path / "plan", "package": Path(analysis.__file__).parent}
    mount = f"mount -t tmpfs none {hidden.get(other)}"
    if other == "version":
        (path,) = Path(distribution("tokenizers").locate_file("")).glob("tokenizers-*.dist-info/METADATA")
        changed = tmp_path / "METADATA"
        changed.write_text(path.read_text().replace("\nVersion: ", "\nVersion: 9."))
        mount = f"mount --bind {changed} {path}"
    with cluster(project, mount) as (_, sweep):
        output = ended(project.start(*sweep))
    assert output.count("its cells run elsewhere") == 1
    assert "given up" not in output
    assert "run again" not in output
    assert project.results() == reference
