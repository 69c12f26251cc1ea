"""Commands of the package in folders of runs/engines, and what they print."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lit_klrb import schema

RUNS = Path("runs/engines")
SAMPLER_KL = "train/sampler_kl"
LLAMA = (
    "{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, "
    "num_attention_heads: 2, max_position_embeddings: 64}"
)
SMALL = ["--data.eval_size", "64", "--trainer.enable_progress_bar", "false"]
# Lines of a log that say what happened; of a command that fails, the last ones are printed as well.
TELLING = (
    "vLLM, ",
    "TRL, ",
    "resum",
    "requeued",
    " passed",
    "tried again",
    "given up",
    " machine",
    "error: ",
    "run now",
    "run elsewhere",
    "goes on",
)


def module(*words: object, processes: int = 1) -> list[str]:
    """The command line of a module of Python, by torchrun if in several processes."""
    torchrun = ["torch.distributed.run", "--nproc_per_node", str(processes), "-m"] if processes > 1 else []
    return [sys.executable, "-m", *torchrun, *map(str, words)]


def log_of(title: str) -> Path:
    """Where a command's output goes."""
    RUNS.mkdir(parents=True, exist_ok=True)
    return folder_of(title).with_suffix(".log")


def tell(title: str, code: int, started: float) -> bool:
    """Print the exit code of a command, its time and what counts in its output."""
    lines = log_of(title).read_text(errors="replace").splitlines()
    print(f"{title}: exit code {code}, {time.monotonic() - started:.0f} s", flush=True)
    said = [line for line in lines if any(words in line for words in TELLING)]
    for line in said if code == 0 else [*said, *lines[-8:]]:
        print(f"  {line}", flush=True)
    return code == 0


def ran(title: str, command: Sequence[str]) -> bool:
    """Run a command to its end."""
    started = time.monotonic()
    with log_of(title).open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    return tell(title, code, started)


@contextmanager
def running(
    title: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A command in a session of its own, which is killed at the end of the block."""
    with (
        log_of(title).open("w") as output,
        subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | (environment or {}),
        ) as process,
    ):
        try:
            yield process
        finally:
            kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a command and all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 1200) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: If it does not come.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was waited for {seconds:.0f} s")
        time.sleep(0.2)


def fit(title: str, stage: str, *words: object) -> bool:
    """Run a stage of the demo, or another configuration, in a new folder of the title's name."""
    root = new_folder(title)
    done = ran(title, fit_command(root, stage, *words))
    if found := logged(title, SAMPLER_KL):
        print(f"  {SAMPLER_KL} before each update: {', '.join(f'{kl:.1e}' for kl in found)}", flush=True)
    return done


def logged(title: str, metric: str) -> list[float]:
    """The values of a metric of a run."""
    rows: list[dict[str, str]] = []
    for path in sorted(folder_of(title).rglob("metrics.csv")):
        with path.open() as file:
            rows += csv.DictReader(file)
    return [float(row[metric]) for row in rows if row.get(metric)]


def fit_command(root: Path, stage: str, *words: object) -> list[str]:
    """The command line that runs a stage of the demo, or another configuration, in a folder."""
    path = stage if "/" in stage else f"configs/demo/{stage}.yaml"
    where = ["--config", path, "--trainer.default_root_dir", root]
    return module("lit_klrb", "fit", *where, *SMALL, *words)


def folder_of(title: str) -> Path:
    """Where the run or sweep of a title is."""
    return RUNS / title.replace(" ", "_")


def new_folder(title: str) -> Path:
    """The folder of a title, of which an earlier call has left nothing."""
    root = folder_of(title)
    shutil.rmtree(root, ignore_errors=True)
    return root


def six_cells(title: str, *, sft: int = 40, processes: int = 1, gpus: int = 0) -> Path:
    """A plan of the demo with short stages, one beta and one replicate: six cells, in a folder of its own.

    Args:
        title: Of the sweep.
        sft: Steps of the first stage.
        processes: In which each cell of the last stage trains.
        gpus: Of its own that each cell gets.
    """
    plan = yaml.safe_load(Path("configs/demo/sweep.yaml").read_text())
    plan |= {"directory": str(new_folder(title).absolute()), "name": "engines"}
    plan["grid"] |= {"beta": {0: 0.3}, "replicates": 1}
    for stage, steps in {"sft": sft, "dpo": 10, "study": 6, "rloo": 6}.items():
        short = {
            "trainer.max_steps": steps,
            "trainer.val_check_interval": steps,
            "data.init_args.eval_size": 64,
        }
        plan["stages"][stage]["overrides"] = plan["stages"][stage].get("overrides", {}) | short
        plan["stages"][stage] |= {"threads": 1, **({"gpus": gpus} if gpus else {})}
    if processes > 1:
        two = {"trainer.devices": processes, "trainer.strategy": "ddp"}
        plan["stages"]["rloo"]["overrides"] |= two
    return written(title, plan)


def written(title: str, plan: Mapping[str, Any]) -> Path:
    """The file of a plan."""
    path = log_of(title).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    return path


def sweep_command(plan: Path, *words: object) -> list[str]:
    """The command line that runs a plan."""
    return module("analysis", "sweep", "--config", plan, *words)


def results(title: str) -> dict[str, bytes]:
    """The published results of a sweep."""
    return {path.name: path.read_bytes() for path in folder_of(title).glob("results/*.json")}


def same_results(title: str, other: str) -> bool:
    """Print whether two sweeps have published the same bytes."""
    ours, theirs = results(title), results(other)
    same = bool(ours) and ours == theirs
    differing = sum(theirs.get(name) != content for name, content in ours.items())
    print(
        f"  {len(ours)} results of {title}, {len(theirs)} of {other}: "
        + ("byte-identical" if same else f"{differing} differ"),
        flush=True,
    )
    return same


def checkpoint_of(title: str) -> Path:
    """The checkpoint of a run."""
    return folder_of(title) / schema.CHECKPOINT


@cache
def small_llama() -> Path:
    """The checkpoint of a Llama that writes the demo's texts, trained once."""
    fit("sft", "sft", "--model.policy_config", LLAMA, "--trainer.max_steps", 60)
    return checkpoint_of("sft")
