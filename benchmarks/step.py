"""Training steps beside TRL's: what is timed, and the results of each machine."""

import functools
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_klrb.files import write_atomically
from lit_klrb.run.machine import processor

from . import floor, step_case as case
from .measure import matrix_product_rate, software
from .turns import Training, take_turns

PACKAGES = ["torch", "transformers", "trl", "lightning"]
# Cycles that count, after those in which memory is first used
ROUNDS, WARM_UP = 5, 1
FOLDER = Path(__file__).parents[1] / "replication" / "evidence" / "steps"
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


class Trainer(NamedTuple):
    """A function of `step_runs` with its options."""

    function: str
    options: dict[str, object]

    def on(self, task: case.Task) -> Training:
        """Its training on a task."""
        from . import step_runs  # TRL takes seconds to import, and may not be installed

        return functools.partial(getattr(step_runs, self.function), task, **self.options)


class Work(NamedTuple):
    """Two trainers that do the same; the time of the first is divided by that of the second.

    Args:
        title: What is done, with which model and precision.
        ours: A trainer of this package.
        other: TRL's, or ours with another estimator.
        goal: Of the ratio.
        task: Model and data; a tiny model is written to the folder.
        inner_epochs: Passes with gradients over each rollout; None for work on given pairs.
    """

    title: str
    ours: Trainer
    other: Trainer
    goal: float
    task: Callable[[Path], case.Task]
    inner_epochs: int | None = None

    def operations(self, task: case.Task) -> float:
        """Of the products with weights in a cycle."""
        if self.inner_epochs is not None:
            return task.operations(self.inner_epochs)
        return task.pair_operations(whole=self.ours.function == "our_sft")


def _smollm2(precision: str, lora: dict[str, object] | None, _: Path) -> case.Task:
    return case.smollm2(precision, lora)


TINY = case.tiny
FP32, BF16, ADAPTED = (
    functools.partial(_smollm2, precision, lora)
    for precision, lora in (("32-true", None), ("bf16-mixed", None), ("bf16-mixed", LORA))
)


def _ours(estimator: str, inner_epochs: int) -> Trainer:
    return Trainer("our_rloo", {"estimator": estimator, "inner_epochs": inner_epochs})


def _rloo(title: str, goal: float, task: Callable[[Path], case.Task], inner_epochs: int = 1) -> Work:
    theirs = Trainer("trl_rloo", {"inner_epochs": inner_epochs})
    return Work(title, _ours("RaoBlackwellControlVariate", inner_epochs), theirs, goal, task, inner_epochs)


def _other(title: str, work: str, goal: float, task: Callable[[Path], case.Task]) -> Work:
    trainers = Trainer(f"our_{work}", {}), Trainer(f"trl_{work}", {})
    return Work(title, *trainers, goal, task, 1 if work == "distill" else None)


WORKS = {
    "rloo": _rloo("RLOO, tiny GPT-2", 0.40, TINY),
    "rloo-4": _rloo("RLOO with four inner steps, tiny GPT-2", 0.40, TINY, 4),
    "dpo": _other("DPO, tiny GPT-2", "dpo", 0.30, TINY),
    "sft": _other("SFT, tiny GPT-2", "sft", 0.40, TINY),
    "distill": _other("distillation, tiny GPT-2", "distill", 0.40, TINY),
    "estimators": Work(
        "`RaoBlackwellControlVariate` and `MonteCarlo` in RLOO, tiny GPT-2",
        _ours("RaoBlackwellControlVariate", 1),
        _ours("MonteCarlo", 1),
        1.02,
        TINY,
        1,
    ),
    "smollm2-fp32": _rloo("RLOO, SmolLM2, float32", 0.50, FP32),
    "smollm2-bf16": _rloo("RLOO, SmolLM2, bfloat16", 0.35, BF16),
    "smollm2-lora": _rloo("RLOO, SmolLM2, bfloat16, LoRA", 0.45, ADAPTED),
    "smollm2-dpo": _other("DPO, SmolLM2, bfloat16", "dpo", 0.50, BF16),
    "smollm2-sft": _other("SFT, SmolLM2, bfloat16", "sft", 0.60, BF16),
    "smollm2-distill": _other("distillation, SmolLM2, bfloat16", "distill", 0.35, BF16),
}


def measure(key: str, rounds: int) -> dict[str, Any] | None:
    """Seconds of both trainers' cycles, and of the products alone; None without the model."""
    work = WORKS[key]
    with tempfile.TemporaryDirectory() as name:
        task = work.task(Path(name))
        if not task.folder.exists():
            return None
        load, peak = os.getloadavg()[0], matrix_product_rate(task.dtype)
        trainings = [trainer.on(task) for trainer in (work.ours, work.other)]
        ours, other = take_turns(trainings, WARM_UP + rounds)
        found = {
            "load": load,
            "threads": torch.get_num_threads(),
            "software": software(PACKAGES),
            "precision": task.precision,
            "peak": peak,
            "ours": ours.seconds[WARM_UP:],
            "other": other.seconds[WARM_UP:],
            "megabytes": [ours.megabytes, other.megabytes],
            "shares": ours.shares,
            "operations": work.operations(task),
        }
        if work.inner_epochs is not None:
            # Outside sampling, the head is in float32
            found["products"] = floor.seconds(task, work.inner_epochs, torch.float32)
        return found


def store(key: str, found: Mapping[str, Any]) -> None:
    """Keep what was measured on this machine, in the file of its processor."""
    path = FOLDER / ("-".join(re.findall(r"[\w.]+", processor().lower())) + ".json")
    machine = (
        json.loads(path.read_text("utf-8")) if path.exists() else {"processor": processor(), "works": {}}
    )
    machine["works"][key] = found
    write_atomically(path, json.dumps(machine, indent=1) + "\n")


def ratio(found: Mapping[str, Any]) -> str:
    """The median of the rounds' ratios, with the least and the most.

    Example:
        >>> ratio({"ours": [1.0, 2.0, 2.0], "other": [4.0, 4.0, 5.0]})
        '.40 (.25–.50)'
    """
    ratios = [a / b for a, b in zip(found["ours"], found["other"], strict=True)]
    values = (statistics.median(ratios), min(ratios), max(ratios))
    middle, least, most = (f"{value:.2f}".removeprefix("0") for value in values)
    return f"{middle} ({least}–{most})"
