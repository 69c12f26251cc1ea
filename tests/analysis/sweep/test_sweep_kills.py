"""Results are complete and unique after kills at any time, also if several sweeps share a directory."""

import contextlib
import os
import random
import signal
from collections import Counter

from sweep_project import session, wait_until

from analysis.results.store import read_result


def published(project):
    return sum(1 for _ in (project.directory / "plan" / "results").glob("*.json"))


def check(project, reference):
    """Check that the killed sweep has the same result files as the undisturbed one."""
    directory = project.directory / "plan"
    assert project.results() == project.results(reference)
    for path in (directory / "results").iterdir():
        read_result(path)
    assert not [*directory.glob("failed/*.json")]
    assert not (directory / "refused").exists()


def test_workers_end_with_their_coordinator(project):
    process = project.start("sweep", "--config", project.write(sft={"seconds": 60}))
    wait_until(lambda: project.ran())
    # Coordinator, fork server, its tracker, and the worker.
    assert len(session(process.pid)) >= 3
    process.kill(alone=True)
    wait_until(lambda: not session(process.pid), seconds=10)


def test_concurrent_sweeps_share_the_work_and_run_no_cell_twice(project):
    plan = project.write(rloo={"seconds": 0.1}, grid={"replicates": 4})
    processes = [project.start("sweep", "--config", plan, "--workers", 2) for _ in range(3)]
    ended = [process.ended() for process in processes]
    assert all(code == 0 and "18 cells: 18 done" in output for code, output in ended), ended
    assert len(project.results()) == 18
    assert Counter(Counter(project.ran()).values()) == {1: 18}


def hunt(project, *, workers, kills, grid, seconds, seed):
    """Run a sweep while random processes are killed; return how often each cell was run."""
    rng = random.Random(seed)
    keys = {"rloo": {"seconds": seconds}, "grid": grid}
    reference = project.write("reference", **keys)
    assert project.run("sweep", "--config", reference, "--workers", workers)[0] == 0
    plan = project.write(**keys)
    # Spread over the sweep: the next kill is due when so many cells are published.
    due = [index * (len(project.results("reference")) - workers) // kills for index in range(kills)]
    done, code = 0, None
    while code != 0:
        process = project.start("sweep", "--config", plan, "--workers", workers)
        while done < kills and process.wait(0) is None:
            least = due[done]
            wait_until(lambda p=process, n=least: p.wait(0) is not None or published(project) >= n)
            victims = session(process.pid)
            if process.wait(0) is None and victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(victims), signal.SIGKILL)
                    done += 1
        code = process.wait(60)
        wait_until(lambda p=process: not session(p.pid))
    check(project, "reference")
    assert not [*(project.directory / "plan" / "results").glob(".*")]
    assert done > kills // 2
    return Counter(project.ran())


def test_random_kills_of_any_process_change_nothing(project):
    ran = hunt(project, workers=4, kills=8, grid={"replicates": 8}, seconds=0.05, seed=0)
    assert len(ran) == 34
