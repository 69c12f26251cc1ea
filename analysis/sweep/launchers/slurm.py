"""Runs each cell as a job of SLURM, on nodes that share the sweep's directory.

SLURM only schedules cells, as with every launcher: it requeues none, as the coordinator submits it again. A
job reads its cell from a file of the sweep's directory and writes its exit code and its node to another; one
that is neither in the queue nor has such a file was lost. A node that cannot run them, as it has no such
directory, no packages or other versions, gets no more.
"""

import getpass
import os
import pickle
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from analysis.sweep.job import FAILED, MISPLACED, Job, misplaced_exit, run_job
from analysis.sweep.launchers import Exit, Options
from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import write_atomically

FOLDER = ".slurm"
# Jobs that are in the queue at the same time, if the number of workers is not given.
SLOTS = 100
# Seconds between looks for exit codes, and between questions for lost jobs.
LOOK, ASK = 0.3, 15.0
# The endings of the files of a job's cell and of what it prints, beside that of its exit code.
CELL, OUT = ".cell", ".out"
# What a job prints once its node has found the directory and the packages.
STARTED = "started"


class SlurmLauncher:
    """Submits one job per cell with `sbatch`.

    Args:
        options: Those of sbatch come after the cores and the GPUs of a cell, so that they decide.

    Raises:
        ConfigurationError: If a command of SLURM is missing, or the options are no words of a command line.
    """

    remote, gpus = True, None

    def __init__(self, options: Options) -> None:
        missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
        if missing:
            raise ConfigurationError(f"--launcher slurm needs {missing[0]}, which is not on this machine")
        self.slots = options.workers or SLOTS
        with refusing(f"{options.slurm} are no options", ValueError, key="--slurm"):
            self._options = shlex.split(options.slurm)
        self._folder = options.directory.absolute() / FOLDER
        # Cell -> its job's number, the file of its exit code, and how often the queue was without it
        self._running: dict[str, tuple[str, Path]] = {}
        self._missed: dict[str, int] = {}
        # Given by the options, and found
        self._unfit = set(re.findall(r"(?:^|\s)(?:--exclude[= ]|-x ?)(\S+)", options.slurm))
        self._asked, self._pause = time.monotonic(), ASK

    def submit(self, job: Job) -> None:
        """Submit a job; it starts when SLURM has a place for it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # cells may have keys of loggers
        path = self._folder / secrets.token_hex(8)
        write_atomically(path.with_suffix(CELL), pickle.dumps(job))
        words = [sys.executable, "-m", "analysis.sweep.launchers.slurm", str(path)]
        command = ["sbatch", "--parsable", "--no-requeue", f"--job-name={job.cell.stage}"]
        command += [f"--output={path}{OUT}", f"--cpus-per-task={job.cores}"]
        command += [f"--gpus={job.gpus}"] if job.gpus else []
        without = [f"--exclude={','.join(sorted(self._unfit))}"] if self._unfit else []
        done = _slurm([*command, *self._options, *without], f"#!/bin/sh\nexec {shlex.join(words)}\n")
        if done.returncode != 0:
            path.with_suffix(CELL).unlink()
            raise OSError(" ".join(done.stderr.split()))
        self._running[job.cell.id] = done.stdout.partition(";")[0].strip(), path

    def wait(self, seconds: float) -> list[Exit]:
        """Wait until a job has written its exit code or is lost, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not (ended := [*self._ended(), *self._lost()]) and time.monotonic() < deadline:
            time.sleep(LOOK)
        for cell_id, *_ in ended:
            _, path = self._running.pop(cell_id)
            self._missed.pop(cell_id, None)
            for file in (path, path.with_suffix(CELL), path.with_suffix(OUT)):
                file.unlink(missing_ok=True)
        return ended

    def ask_to_stop(self) -> None:
        """Ask the running cells to save a checkpoint and exit, and take the others out of the queue."""
        if jobs := [job for job, _ in self._running.values()]:
            _slurm(["scancel", "--state=PENDING", *jobs])
            _slurm(["scancel", "--signal=TERM", "--batch", *jobs])
        self._pause = 1.0

    def stop(self) -> None:
        """Cancel the jobs."""
        if jobs := [job for job, _ in self._running.values()]:
            _slurm(["scancel", *jobs])
        self._running.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ended(self) -> list[Exit]:
        exits = []
        for cell_id, (_, path) in self._running.items():
            if path.exists():
                code, node, reason = _exit_of(path)
                if code == MISPLACED:
                    self._unfit.add(node)
                exits.append(Exit(cell_id, code, reason))
        return exits

    def _lost(self) -> list[Exit]:
        """Jobs that were twice not in the queue: the file of an exit code may be seen late."""
        if not self._running or time.monotonic() - self._asked < self._pause:
            return []
        self._asked = time.monotonic()
        done = _slurm(["squeue", "--noheader", "--format=%A", f"--user={getpass.getuser()}"])
        if done.returncode != 0:
            return []  # SLURM itself is not there, its jobs may be
        queue, lost = set(done.stdout.split()), []
        for cell_id, (job, path) in self._running.items():
            there = job in queue or path.exists()
            self._missed[cell_id] = 0 if there else self._missed.get(cell_id, 0) + 1
            if self._missed[cell_id] == 2:
                out = path.with_suffix(OUT)
                lines = out.read_text(errors="replace").splitlines() if out.exists() else []
                if STARTED not in lines and (node := _node_of(job)):
                    self._unfit.add(node)
                    words = lines[-1] if lines else f"it writes nothing to {path.parent}"
                    lost.append(Exit(cell_id, MISPLACED, f"{node} cannot start cells: {words}"))
                    continue
                words = " ".join(lines[-3:])
                lost.append(Exit(cell_id, FAILED, f"SLURM's job {job} ended without a result {words}"))
        return lost


def _slurm(command: list[str], text: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def _node_of(job: str) -> str | None:
    """The node that a job was started on; None if it was on none, or SLURM has forgotten it."""
    match = re.search(r" NodeList=([\w.-]+)", _slurm(["scontrol", "--oneliner", "show", "job", job]).stdout)
    return match[1] if match else None


def _exit_of(path: Path) -> tuple[int, str, str]:
    """The exit code, the node and the reason that a job has written."""
    code, _, rest = path.read_text(errors="replace").partition(" ")
    node, _, reason = rest.partition(" ")
    if not re.fullmatch(r"-?\d+", code):
        return FAILED, node, f"{path} holds no exit code"
    return int(code), node, reason


def main(path: str) -> None:
    """Run a job on the node that SLURM chose, and write its exit code."""
    job: Job = pickle.loads(Path(path).with_suffix(CELL).read_bytes())
    print(STARTED, flush=True)
    node = os.environ["SLURMD_NODENAME"]
    code, reason = misplaced_exit(job) or (FAILED, "")
    if not reason:
        try:
            run_job(job)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else FAILED
    if Path(path).parent.exists():  # where the sweep's directory is not shared, nobody would read it
        write_atomically(Path(path), f"{code} {node} {reason}")


if __name__ == "__main__":
    main(sys.argv[1])
