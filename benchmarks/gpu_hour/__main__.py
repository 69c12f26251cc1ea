"""Measure on a GPU, in order and within a budget: `make gpu-hour`.

Each result is written when it is there, to runs/gpu-hour/CARD/results.jsonl and to page.md beside it. The
same command continues where the budget ended, unless the code has changed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from analysis.design.fingerprint import code_hash
from benchmarks.table import markdown, number
from lit_klrb.files import sync, write_atomically
from lit_klrb.run.machine import processor

FOLDER = Path("runs/gpu-hour")
# Seconds after which a measurement is given up, and the fewest that are worth a start.
LIMIT, LEAST = 600.0, 20.0
# The tests of what depends on a device; `make gpu` runs them all.
TESTS = (
    *("tests/cli/test_gpu.py", "tests/cli/test_resume.py", "tests/callbacks", "tests/benchmarks"),
    *(f"tests/modules/test_{name}.py" for name in ("precision", "lora", "rloo", "dpo", "distill")),
)
SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")


class Unit(NamedTuple):
    """A measurement.

    Args:
        part: The section of the page that it belongs to.
        name: Its row there.
        function: The name of a function of `measurements`.
        arguments: Its arguments.
        chain: Measurements that grow: none is made after one of the same chain that did not fit.
    """

    part: str
    name: str
    function: str
    arguments: tuple[str, ...] = ()
    chain: str = ""


def in_order() -> list[Unit]:
    """Everything that is measured, the most wanted first."""
    works, steps = (
        ("rloo", "distill", "dpo", "sft"),
        "Steps beside TRL's, Qwen3-0.6B's shape, file in bfloat16",
    )
    heads = ("op-gpt2-fp32", "op-gpt2-bf16", "op-152k-fp32", "op-152k-bf16")
    kinds = ("full", "gradient checkpointing", "LoRA")
    return [
        *(Unit("Tests", path, "tests", (path,)) for path in TESTS),
        Unit(steps, "weights", "dtypes"),
        *(Unit(steps, work, "step", (work,)) for work in works),
        *(Unit("The tiled loss beside TRL's and Liger's", head, "tiled_loss", (head,)) for head in heads),
        *(
            Unit("Profiles", f"{who} {work}", "profile", (who, work))
            for work in works[2:]
            for who in ("our", "trl")
        ),
        *(
            Unit("Largest model", f"{kind}, {size}", "largest", (kind, size), kind)
            for kind in kinds
            for size in SIZES
        ),
        *(Unit("Rollouts", backend, "rollouts", (backend,)) for backend in ("transformers", "vllm")),
    ]


class Results:
    """What was measured on a card with some code: a line of JSON per measurement.

    Args:
        folder: Of the card.
        code: The commit.
    """

    def __init__(self, folder: Path, code: str) -> None:
        self.folder, self.code = folder, code
        path = folder / "results.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self.rows = [row for row in map(json.loads, lines) if row["code"] == code]

    def of(self, unit: Unit) -> dict[str, Any] | None:
        """The result of a measurement; None if it is still to be made."""
        found = [row["result"] for row in self.rows if (row["part"], row["name"]) == (unit.part, unit.name)]
        return found[-1] if found else None

    def is_over(self, chain: str) -> bool:
        """Whether a measurement of a chain did not fit."""
        return bool(chain) and any(
            row["chain"] == chain and not row["result"].get("fits", True) for row in self.rows
        )

    def add(self, unit: Unit, result: dict[str, Any], seconds: float) -> None:
        """Write a result, and the page."""
        row = {"part": unit.part, "name": unit.name, "chain": unit.chain, "code": self.code}
        row |= {"minutes": round(seconds / 60, 2), "result": result}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        sync(self.folder / "results.jsonl")
        self.rows.append(row)
        write_atomically(self.folder / "page.md", self.page())

    def page(self) -> str:
        """A section per part, with a table of its numbers and the texts."""
        parts = dict.fromkeys(row["part"] for row in self.rows)
        sections = [_section(part, [row for row in self.rows if row["part"] == part]) for part in parts]
        return "\n\n".join([f"# {self.folder.name}, {self.code}", *sections]) + "\n"


def _section(title: str, rows: Sequence[dict[str, Any]]) -> str:
    tables = [row for row in rows if "text" not in row["result"]]
    columns = dict.fromkeys(key for row in tables for key in row["result"])
    cells = [
        [row["name"], *(_shown(row["result"].get(key)) for key in columns), f"{row['minutes']:g}"]
        for row in tables
    ]
    texts = [f"### {row['name']}\n\n{row['result']['text']}" for row in rows if "text" in row["result"]]
    table = [markdown(["", *columns, "minutes"], cells)] if cells else []
    return "\n\n".join([f"## {title}", *table, *texts])


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) or value is None else str(value)


def measured(unit: Unit, seconds: float, small: bool, log: Path) -> dict[str, Any] | None:
    """The result of a measurement in processes of its own; None if they were killed after the time given."""
    log.parent.mkdir(parents=True, exist_ok=True)
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    request = json.dumps([unit.function, *unit.arguments, small])
    command = [sys.executable, "-m", "benchmarks.gpu_hour.measurements", request, str(answer)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if answer.exists():
        result: dict[str, Any] = json.loads(answer.read_text("utf-8"))
        return result
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was printed")
    return {"error": f"exit code {code}: {last[:200]}"}


def run(units: Iterable[Unit], results: Results, minutes: float, small: bool) -> bool:
    """Make the measurements that are left, within the budget; whether none is left."""
    end = time.monotonic() + 60 * minutes
    for unit in units:
        if results.of(unit) is not None or results.is_over(unit.chain):
            continue
        left = end - time.monotonic()
        if left < LEAST:
            return False
        started, log = time.monotonic(), re.sub(r"[^\w.]+", "-", f"{unit.part} {unit.name}") + ".log"
        found = measured(unit, min(left, LIMIT), small, results.folder / "logs" / log)
        took = time.monotonic() - started
        if found is None and took < LIMIT:
            return False  # cut by the budget: the next call makes it again
        found = {"error": f"not done in {LIMIT / 60:g} minutes"} if found is None else found
        results.add(unit, found, took)
        print(f"{unit.part}: {unit.name}: {json.dumps(found)[:300]} ({took:.0f} s)", flush=True)
    return True


def code() -> str:
    """The commit of this checkout, if it is one, and the hash of all that the measurements import."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return f"{done.stdout.strip()} {code_hash('benchmarks.gpu_hour.measurements')[:12]}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 if everything is, 1 if the budget ended before, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_hour", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="the budget (default: 60)")
    parser.add_argument(
        "--stand-in", action="store_true", help="tiny sizes on the CPU, to try the command itself"
    )
    arguments = parser.parse_args(argv)
    if not (arguments.stand_in or torch.cuda.is_available()):
        print(
            "gpu-hour needs a GPU, and torch finds none on this machine: nothing was measured",
            file=sys.stderr,
        )
        return 2
    if arguments.stand_in:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    card = f"stand-in on {processor()}" if arguments.stand_in else torch.cuda.get_device_name()
    results = Results(FOLDER / re.sub(r"[^\w.]+", "-", card), code())
    done = run(in_order(), results, arguments.minutes, arguments.stand_in)
    print(f"\n{results.page()}\n{results.folder / 'page.md'}")
    if not done:
        print(f"the budget of {arguments.minutes:g} minutes is spent: the same command continues")
    return int(not done)


if __name__ == "__main__":
    sys.exit(main())
