"""Runs one cell in a separate process, claim, train, publish, and collects its result."""

import csv
import io
import json
import math
import os
import platform
import runpy
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from analysis.checks.settings import LOCAL_PATHS, SECTIONS, TRAINER
from analysis.design.cells import RATE, RUNS
from analysis.design.fingerprint import environment
from analysis.design.resources import VISIBLE
from analysis.results import Cell, layout
from analysis.results.curves import curves, last_completions
from analysis.results.keys import flat
from analysis.results.layout import RESULT_SCHEMA
from analysis.sweep.store import Store
from lit_klrb import schema
from lit_klrb.errors import CELL, OUTAGE
from lit_klrb.files import damage, read_object, sync, write_atomically
from lit_klrb.stops import SIGNALS, Stops

# Number of completions published per run, and the maximum number of characters of each.
_COMPLETIONS, _LETTERS = 5, 1_000
# What is published as it stands in the summary.
_PUBLISHED = (schema.WEIGHTS, schema.ROWS, schema.PROMPTS, schema.PROCESSES, schema.STEP_ROWS)
# Columns of the final evaluation that are published, and their significant digits.
_PROMPT_VALUES, _DIGITS = (schema.REWARD, schema.KL), 4


def harvest(cell: Cell, run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """The result of a finished run, without its checksum; identical for every repetition of the run.

    Numbers that are not finite become None. A run whose final reward or KL is not finite counts as diverged,
    regardless of its summary, so that no statistic uses such a value.
    """
    state = summary["state"]
    final = {name: _finite(value) for name, value in summary["final"].items()}
    if any(final.get(name, 0.0) is None for name in (schema.REWARD, schema.KL)):
        state = schema.DIVERGED
    studies = {path.stem: json.loads(path.read_bytes()) for path in (run / schema.STUDIES).glob("*.json")}
    shown = completions(run)
    prompts = {} if state == schema.DIVERGED else prompt_values(run / schema.EVALUATION)
    return {
        "schema": RESULT_SCHEMA,
        "id": cell.id,
        "cell": cell.record(),
        "state": state,
        "final": final,
        "curves": curves(run / schema.METRICS_DIR),
        "versions": summary["versions"],
        **{key: summary[key] for key in _PUBLISHED if key in summary},
        **({"studies": studies} if studies else {}),
        **({"completions": shown} if shown else {}),
        **({"prompts": prompts} if prompts else {}),
        "settings": settings(run / schema.CONFIG),
    }


def completions(run: Path) -> list[dict[str, Any]]:
    """A few completions of the latest and the first evaluation; empty without a table of completions."""
    return [
        {
            **{name: row[name][:_LETTERS] for name in ("text_at_start", "text")},
            **{name: _finite(float(row[name])) for name in ("reward_at_start", "reward")},
        }
        for row in last_completions(run)[:_COMPLETIONS]
    ]


def prompt_values(path: Path) -> dict[str, list[float]]:
    """Reward and KL of each prompt of the final evaluation, rounded; empty without its file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(f"{float(row[name]):.{_DIGITS}g}") for row in rows] for name in _PROMPT_VALUES}


def settings(config: Path) -> dict[str, Any]:
    """The hyperparameters of a run: dotted key -> value, without nulls and local paths."""
    if not config.exists():
        return {}
    content = yaml.safe_load(config.read_text("utf-8"))
    kept = {name: content.get(name) for name in SECTIONS}
    kept["trainer"] = {name: (content.get("trainer") or {}).get(name) for name in TRAINER}
    return {
        key.replace("init_args.", ""): value
        for key, value in flat(kept)
        if isinstance(value, str | int | float) and not str(value).startswith(LOCAL_PATHS)
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# Libraries that read from the environment, before they are loaded, how many threads to compute with.
LIBRARIES = "OMP", "MKL", "OPENBLAS"
# Exit codes of a job: result published; no result; wrong usage; cell claimed by another process; a machine
# without the sweep's directory or with other software.
PUBLISHED, FAILED, USAGE, BUSY, MISPLACED = 0, 1, 2, 75, 76
# Exit codes of a command that was stopped by a signal.
STOPPED = {128 + number for number in SIGNALS}


@dataclass(frozen=True)
class Job:
    """A cell to be run."""

    cell: Cell
    directory: Path  # the sweep's directory
    module: str  # the package whose `fit` command runs it
    needs_checkpoint: bool  # whether another cell needs its checkpoint
    rate: float | None = None  # the rate chosen for its arm; None without tuning
    threads: int = 1  # threads that each of its processes computes with
    processes: int = 1  # processes in which it trains
    gpus: int = 0  # GPUs of its own that it gets
    visible: str | None = None  # which ones, as CUDA_VISIBLE_DEVICES; None where a scheduler has set it
    token: str = ""  # content of the file by which a machine recognises the sweep's directory
    # What `environment` found where the sweep was started; empty if it runs there
    software: Mapping[str, str | int] = field(default_factory=dict)
    # Name -> value or None of what the configuration reads from the environment, where the sweep was started
    environment: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def cores(self) -> int:
        """Cores that its processes compute on."""
        return self.threads * self.processes


def misplaced_exit(job: Job) -> tuple[int, str] | None:
    """The exit code of a job on a machine that cannot run it, and why; None on one that can."""
    host = platform.node()
    if Store(job.directory).token() != job.token:
        return MISPLACED, f"{host} does not have {job.directory}, which all machines must share"
    here = software(job.module, job.threads) if job.software else {}
    others = [
        f"{name} {here.get(name)}, not {value}"
        for name, value in job.software.items()
        if here.get(name) != value
    ]
    if others:
        return MISPLACED, f"{host} has other software than the machine of the sweep: {', '.join(others)}"
    return None


@cache
def software(module: str, threads: int) -> Mapping[str, str | int]:
    """The code and the versions of this machine, as they enter the ids of cells."""
    return environment(module, threads)


def run_job(job: Job) -> None:
    """Run a cell unless it is settled or claimed, publish its result, and exit the process."""
    # A cell starts its own processes, on one machine, whatever a scheduler has started around it
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ[CELL] = job.cell.id
    for name, value in job.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if job.visible is not None:  # nothing has used a GPU yet, where cells are forked
        os.environ[VISIBLE] = job.visible
    for library in LIBRARIES:
        os.environ[f"{library}_NUM_THREADS"] = str(job.threads)
    if torch := sys.modules.get("torch"):  # has read them, where cells are forked
        torch.set_num_threads(job.threads)
    # A terminal sends Ctrl-C to every process, but only the coordinator decides when to stop: it sends
    # SIGTERM, or exits at once, which ends this process too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Stops.at_once = False
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = Store(job.directory)
    with store.claim(job.cell.id) as claimed:
        if not claimed:
            sys.exit(BUSY)
        settled = store.is_settled(job.cell.id, job.needs_checkpoint)
        sys.exit(PUBLISHED if settled else _run(job, store))


def _run(job: Job, store: Store) -> int:
    started = time.monotonic()
    cell = job.cell
    workdir = store.workdir(cell.id)
    checkpoint = workdir / schema.CHECKPOINT
    runs, rate = str(job.directory), json.dumps(job.rate)
    argv = [argument.replace(RUNS, runs).replace(RATE, rate) for argument in cell.argv]
    # An attempt that was killed or stopped is resumed from its checkpoint, with the same result bit for bit.
    # Without a checkpoint there is nothing to keep. A published cell is repeated from the start, as its
    # directory is read-only otherwise.
    resumed = checkpoint.exists() and not store.is_settled(cell.id, needs_checkpoint=False)
    if resumed:
        (workdir / schema.SUMMARY).unlink(missing_ok=True)
        # Of an earlier attempt that ended but was killed before it published
        store.seconds(cell.id).unlink(missing_ok=True)
        argv += ["--ckpt_path", str(checkpoint)]
    else:
        store.clear(cell.id)
    OmegaConf.save(OmegaConf.create(cell.config), workdir / layout.STAGE)
    _redirect_output(store.log(cell.id))
    print("$ python -m", job.module, shlex.join(argv))
    code = _run_module(job.module, argv)
    summary = read_object(workdir / schema.SUMMARY)
    diverged = summary.get("state") == schema.DIVERGED
    # A diverged run may exit with an error code; its summary makes it a result nevertheless
    if code and not diverged:
        if resumed and (problem := damage(checkpoint)) is not None:
            print(f"{checkpoint}: {problem}; the next attempt starts from the beginning")
            checkpoint.unlink(missing_ok=True)
        if code in STOPPED or code == OUTAGE:
            return code
        # What was begun with these settings does not fail because of them
        return USAGE if code == USAGE and not resumed else FAILED
    if not diverged and summary.get("state") != schema.DONE:
        print(f"the run ended without {schema.SUMMARY} that says {schema.DONE} or {schema.DIVERGED}")
        return FAILED
    if checkpoint.exists():
        # Other cells rely on the checkpoint once the result is published: it must be on disk before
        sync(checkpoint)
    elif job.needs_checkpoint and not diverged:
        print(f"the run ended without {schema.CHECKPOINT}, from which other cells start")
        return FAILED
    if not resumed:  # the time of the earlier attempts is unknown
        write_atomically(store.seconds(cell.id), f"{time.monotonic() - started:.3f}".encode())
    if not store.publish(harvest(cell, workdir, summary)):
        print("this result differs from the published one")
    return PUBLISHED


def _run_module(module: str, argv: list[str]) -> int:
    """Run `python -m module argv...` in this process, which has the imports already; return its exit code."""
    sys.argv = [module, *argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
    # Keeps standard output and errors in order, and loses nothing if the process is killed
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)


def _end_with_parent() -> None:
    """Kill this process when the coordinator exits, as nothing else would stop it."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)
