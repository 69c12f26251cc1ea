"""CPU seconds and memory of `plan`, of a sweep's coordinator and of `report`, for large sweeps.

`python -m benchmarks.scale [cells ...]` makes a sweep per size, by default of 500, 4,000 and 5,000 cells, in
a temporary folder. Its cells end in milliseconds: they are those of the tests of sweeps.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

JOBS = Path(__file__).parents[1] / "tests" / "analysis" / "sweep"
SIZES = (500, 4000, 5000)
# Cells of two arms at five betas per replicate; the stages before them add one cell each
PER_REPLICATE = 10
# Prints what the command itself used, without the processes that it started
MEASURED = """\
import json, resource, sys
from analysis.cli import main
code = main(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_SELF)
with open(sys.argv[1], "w") as file:
    json.dump([code, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20], file)
"""


def write_plan(folder: Path, cells: int) -> Path:
    """A plan with at least so many cells in its last stage."""
    job = folder / "job.yaml"
    job.write_text("seconds: 0\n")
    start = {"model.init_args.reference_path": "sft"}
    stages = {
        "sft": {"config": str(job)},
        "dpo": {"config": str(job), "inputs": start},
        "rloo": {"config": str(job), "inputs": {**start, "model.init_args.policy_path": "dpo"}},
    }
    grid = {
        "arms": ["MonteCarlo", "RaoBlackwell"],
        "beta": {step: 0.1 * (step + 1) for step in range(PER_REPLICATE // 2)},
        "replicates": -(-cells // PER_REPLICATE),
    }
    plan = {"name": "scale", "directory": str(folder / "sweep"), "module": "fake_job"}
    plan |= {"stages": stages, "grid": grid, "primary": {"control": "MonteCarlo"}}
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    return path


def measured(folder: Path, *words: object) -> tuple[float, float]:
    """CPU seconds and peak memory in GiB of a command of `lit-klrb`, its imports included.

    Raises:
        RuntimeError: If the command fails.
    """
    paths = filter(None, (str(JOBS), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    numbers = folder / "used.json"
    command = [sys.executable, "-c", MEASURED, str(numbers), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    code, seconds, memory = json.loads(numbers.read_text())
    if code:
        raise RuntimeError(f"exit code {code}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds, memory


def main(argv: Sequence[str]) -> None:
    """Print a row per size."""
    print("| cells | plan, CPU s | coordinator, CPU s | report, CPU s | report, GiB |\n|---|---|---|---|---|")
    for cells in map(int, argv or SIZES):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            plan = write_plan(folder, cells)
            planned, _ = measured(folder, "plan", "--config", plan)
            coordinated, _ = measured(folder, "sweep", "--config", plan)
            reported, memory = measured(folder, "report", folder / "sweep")
        print(f"| {cells} | {planned:.1f} | {coordinated:.1f} | {reported:.1f} | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
