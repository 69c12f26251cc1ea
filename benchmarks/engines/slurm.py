"""A cluster of SLURM with two nodes on this machine: sweeps by jobs, and a run that is requeued.

Each node declares a GPU that it does not have, so that jobs can ask for one.
"""

import contextlib
import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from analysis.design.resources import VISIBLE
from benchmarks.engines.commands import (
    fit,
    fit_command,
    folder_of,
    log_of,
    new_folder,
    ran,
    results,
    running,
    same_results,
    six_cells,
    sweep_command,
    tell,
    wait_until,
)
from benchmarks.kills.compare import different
from lit_klrb import schema

PORT = 27817
CONFIGURATION = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
NodeName=one,two NodeHostname={host} NodeAddr=127.0.0.1 Port={first},{second} CPUs=2 Gres=gpu:1
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# A file that is there in place of the card's
GPUS = "AutoDetect=off\nNodeName=one,two Name=gpu File=/dev/null\n"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
# Long enough that a run is warned, and then taken away, before its end.
STEPS = ["--trainer.max_steps", 300, "--trainer.val_check_interval", 100]
# How often a cell is taken away, after some steps each time, and its steps.
TIMES, LONG = 8, 300


def asked(*words: str, script: str | None = None) -> str:
    """What a command of SLURM prints."""
    done = subprocess.run(words, input=script, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextmanager
def cluster(mount: str = "") -> Iterator[None]:
    """Start the daemons, and stop them and all jobs at the end of the block; only node two sees `mount`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm")))
        user, host = getpass.getuser(), socket.gethostname().partition(".")[0]
        file, key, heard = (folder / name for name in ("slurm.conf", "key", "munge.socket"))
        ports = {"port": PORT, "first": PORT + 1, "second": PORT + 2}
        file.write_text(CONFIGURATION.format(host=host, user=user, folder=folder, **ports))
        (folder / "gres.conf").write_text(GPUS)
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        places = [
            f"--{place}={folder}/munge.{place}" for place in ("socket", "pid-file", "log-file", "seed-file")
        ]
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", *places]
        os.environ["SLURM_CONF"] = str(file)
        stack.enter_context(running("munged", munged))
        wait_until(heard.exists, "munged")
        stack.enter_context(running("slurmctld", ["slurmctld", "-D"]))
        for name in ("one", "two"):
            command = ["slurmd", "-D", "-N", name]
            if mount and name == "two":
                command = ["unshare", "--mount", "sh", "-c", f"{mount} && exec {shlex.join(command)}"]
            stack.enter_context(running(f"slurmd {name}", command))
        wait_until(lambda: asked("sinfo", "-h", "-o", "%D %t") == "2 idle", "SLURM")
        # A job's last daemon would wait for ever for a controller that has gone
        stack.callback(wait_until, lambda: not asked("squeue", "-h"), "the end of all jobs")
        stack.callback(asked, "scancel", f"--user={user}")
        yield


def requeued() -> bool:
    """A run that SLURM warns and then takes away, beside an undisturbed one."""
    title, whole = "slurm requeued run", "slurm undisturbed run"
    done = fit(whole, "sft", *STEPS)
    root, started = new_folder(title), time.monotonic()
    log_of(title).unlink(missing_ok=True)
    script = f"#!/bin/sh\nexec {shlex.join(fit_command(root, 'sft', *STEPS, '--ckpt_path', 'auto'))}\n"
    sbatch = ["sbatch", "--parsable", "--requeue", "--open-mode=append", f"--output={log_of(title)}"]
    job = asked(*sbatch, script=script)
    warn, take = ("scancel", "--signal=USR1", "--batch", job), ("scontrol", "requeue", job)
    for attempt, command in enumerate((warn, take)):
        metrics = root / schema.METRICS_DIR / f"attempt_{attempt}" / "metrics.csv"
        wait_until(
            lambda metrics=metrics: metrics.exists() and metrics.read_text().count("\n") > 5,
            f"step of {metrics}",
        )
        asked(*command)
        wait_until(lambda: asked("squeue", "-h", "-j", job, "-o", "%t") == "PD", "the requeue")
        # SLURM holds it back for two minutes; a node does not start what it is still ending
        asked("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    wait_until((root / schema.SUMMARY).exists, "the end of the run")
    tell(title, 0, started)
    unequal = different(folder_of(whole), root)
    print(f"  beside the undisturbed run: {', '.join(unequal) or 'bit-identical'}", flush=True)
    return done and not unequal


def drained() -> bool:
    """Six cells as jobs, while a node is drained, beside those of the local launcher."""
    done = ran("sweep local", sweep_command(six_cells("sweep local")))
    title, started = "sweep slurm", time.monotonic()
    with running(title, sweep_command(six_cells(title), "--launcher", "slurm")) as process:
        wait_until(lambda: len(results(title)) >= 2 or process.poll() is not None, "two results")
        asked("scontrol", "update", "NodeName=two", "State=drain", "Reason=test")
        print(f"  node two is drained after {len(results(title))} results", flush=True)
        code = process.wait()
    return tell(title, code, started) and same_results(title, "sweep local") and done


def preempted() -> bool:
    """Cells as jobs that ask for a GPU, the last of two processes; the first is taken away eight times.

    SLURM may not start its job again, as the coordinator submits another.
    """
    title, whole = "sweep slurm preempted", "sweep local in two processes"
    cells = {"sft": LONG, "processes": 2}
    done = ran(whole, sweep_command(six_cells(whole, **cells)))
    started, jobs, seen = time.monotonic(), list[set[str]](), set[str]()
    plan = six_cells(title, **cells, gpus=1)
    with running(title, sweep_command(plan, "--launcher", "slurm")) as process:
        for attempt in range(TIMES):

            def trained(attempt: int = attempt) -> bool:
                jobs.append(set(asked("squeue", "-h", "-n", "sft", "-t", "R,CG", "-o", "%A").split()))
                metrics = [*folder_of(title).rglob(f"attempt_{attempt}/metrics.csv")]
                return process.poll() is not None or any(len(rows_of(path)) > 3 for path in metrics)

            wait_until(trained, f"steps of attempt {attempt}")
            if process.poll() is not None:
                break
            (job,) = jobs[-1]
            if attempt == 0:
                refused = subprocess.run(["scontrol", "requeue", job], capture_output=True, check=False)
                done = done and refused.returncode != 0
                print(f"  SLURM's own requeue: {refused.stderr.decode().strip()}", flush=True)
            seen |= {gpus_of_job(job)}
            asked("scancel", "--signal=TERM", "--batch", job)
            wait_until(
                lambda job=job: job not in asked("squeue", "-h", "-o", "%A").split(), f"the end of {job}"
            )
        code = process.wait()
    most, stops = max(map(len, jobs)), log_of(title).read_text().count("goes on from its newer checkpoint")
    print(f"  at most {most} job of the cell at a time, {stops} stops; each asked for {', '.join(seen)}")
    alone = most == 1 and stops == TIMES and len(seen) == 1
    return tell(title, code, started) and same_results(title, whole) and done and alone


def rows_of(metrics: Path) -> list[str]:
    """The lines of a file of metrics."""
    return metrics.read_text().splitlines()


def gpus_of_job(job: str) -> str:
    """What a job asked for, and what its processes see of it."""
    shown = asked("scontrol", "--oneliner", "show", "job", job)
    request = re.search(r"TresPerJob=(\S+)", shown)
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environment = dict(
                line.partition("=")[::2] for line in path.read_text(errors="replace").split("\0")
            )
            if environment.get("SLURM_JOB_ID") == job and VISIBLE in environment:
                visible = environment[VISIBLE]
                return f"{request and request[1]}, {VISIBLE}={visible}"
    return f"{request and request[1]}, nothing is visible"


def misplaced() -> bool:
    """Six cells as jobs, of which a node without the sweep's directory can run none."""
    title = "sweep slurm without a folder"
    plan, folder = six_cells(title), folder_of(title).absolute()
    folder.mkdir()
    with cluster(f"mount -t tmpfs none {shlex.quote(str(folder))}"):
        done = ran(title, sweep_command(plan, "--launcher", "slurm", "--workers", 2))
    return done and same_results(title, "sweep local")


def run() -> bool | None:
    """All, if SLURM is installed."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        print(f"slurm: left out, as this machine has no {missing[0]} (apt-get install slurm-wlm munge)")
        return None
    with cluster():
        done = [requeued(), drained(), preempted()]
    return all([*done, misplaced()])
