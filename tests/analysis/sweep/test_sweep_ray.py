"""Cells as Ray tasks: the same results as with the local launcher, even if a node fails."""

import signal
import subprocess
import sys

import pytest
from sweep_project import HERE, session, wait_until

pytest.importorskip("ray")

# Ray's servers take seconds to start and print warnings.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_ray_publishes_what_the_local_launcher_publishes(project):
    assert project.run("sweep", "--config", project.write("reference"))[0] == 0
    code, output = project.run("sweep", "--config", project.write(), "--launcher", "ray", "--workers", 2)
    assert code == 0, output
    assert "10 cells: 10 done; 10 run now" in output
    assert project.results() == project.results("reference")


def test_a_stop_kills_the_cells_and_the_next_sweep_completes_them(project):
    rloo = {"seconds": 0.6}
    assert project.run("sweep", "--config", project.write("reference", rloo=rloo))[0] == 0
    plan = project.write(rloo=rloo)
    process = project.start("sweep", "--config", plan, "--launcher", "ray", "--workers", 2)
    wait_until(lambda: len(project.ran()) >= 4, seconds=120)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    wait_until(lambda: not session(process.pid))
    # Cells that were running have no result.
    assert len(project.results()) < len({*project.ran()})
    assert project.run("sweep", "--config", plan)[0] == 0
    assert project.results() == project.results("reference")


def test_a_node_lost_in_the_middle_changes_nothing(project):
    rloo, grid = {"seconds": 0.3}, {"replicates": 6}
    assert project.run("sweep", "--config", project.write("reference", rloo=rloo, grid=grid))[0] == 0
    plan = project.write(rloo=rloo, grid=grid)
    with subprocess.Popen(
        [sys.executable, HERE / "ray_cluster.py"],
        # Nodes run the sweep's code: it must be found there as it is here.
        env=project.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as cluster:
        line = next(line for line in cluster.stdout if line.startswith("address"))
        process = project.start("sweep", "--config", plan, "--launcher", "ray", "--address", line.split()[1])
        results = project.directory / "plan" / "results"
        wait_until(lambda: results.exists() and len(list(results.glob("*.json"))) >= 6, seconds=120)
        cluster.stdin.write("lose a node\n")
        cluster.stdin.flush()
        output, _ = process.communicate(timeout=240)
        cluster.stdin.close()
        assert process.returncode == 0, output
    assert project.results() == project.results("reference")
