"""Checks that the cells of a plan can start, and which objective each arm optimises.

This process never imports torch: `python -m MODULE check` builds what every stage and every arm would train.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from analysis.design.cells import RATE, RUNS
from analysis.results import Cell, Plan, layout
from analysis.results.arm import Arm
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

CHECK = "check"


def examine(plan: Plan, cells: Sequence[Cell]) -> dict[str, Arm]:
    """Check every stage and every arm, at each beta where it changes other values, by its first cell there.

    Args:
        plan: The plan.
        cells: The cells of the plan.

    Returns:
        The estimator and evaluation of each arm, by label.

    Raises:
        ConfigurationError: If a stage or an arm would be refused; one line on the first of them.
    """
    first: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        if cell.trial is not None:  # as in the grid, but for the rate
            continue
        first.setdefault((_place(cell), json.dumps(cell.overrides, sort_keys=True)), cell)
    answers: dict[str, dict[str, Any]] = {}
    for (place, _), answer in zip(first, _ask(plan, list(first.values())), strict=True):
        if "error" in answer or place not in answers:
            answers[place] = answer
    arms = {label: answers[f"grid.arms.{label}"] for label in plan.grid.arms}
    _refuse(answers, arms, shared=f"stages.{list(plan.stages)[-1]}")
    control = arms[plan.primary.control]["evaluation"]
    return {label: _arm(answer, control) for label, answer in arms.items()}


def _place(cell: Cell) -> str:
    return f"grid.arms.{cell.point.arm}" if cell.point else f"stages.{cell.stage}"


def _refuse(answers: Mapping[str, dict[str, Any]], arms: Mapping[str, dict[str, Any]], shared: str) -> None:
    errors = {place: answer["error"] for place, answer in answers.items() if "error" in answer}
    if not errors:
        return
    place, error = next(iter(errors.items()))
    # An error of every arm is an error of the configuration that they share
    if len(arms) > 1 and all(arm.get("error") == error for arm in arms.values()):
        place = shared
    raise ConfigurationError(error, key=place)


def _arm(answer: Mapping[str, Any], control: Mapping[str, Any]) -> Arm:
    estimator, own = answer["estimator"] or {}, answer["evaluation"]
    keys = sorted(key for key in {**control, **own} if own.get(key) != control.get(key))
    return Arm(
        answer["module"],
        estimator.get("name"),
        estimator.get("optimises"),
        estimator.get("biased") is True,  # rather than by what corrects later steps, which `optimises` says
        {key: [own.get(key), control.get(key)] for key in keys},
    )


def _ask(plan: Plan, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The answer for each cell, from a temporary directory with empty files for its inputs."""
    with TemporaryDirectory(prefix="plan-") as runs:
        for cell in cells:
            for folder in (cell.id, *cell.needs):
                checkpoint = layout.workdir(Path(runs), folder) / schema.CHECKPOINT
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                checkpoint.touch()
            OmegaConf.save(OmegaConf.create(cell.config), layout.workdir(Path(runs), cell.id) / layout.STAGE)
        rate = json.dumps(plan.tuning.rates[0]) if plan.tuning else RATE
        requests = [
            [argument.replace(RUNS, runs).replace(RATE, rate) for argument in cell.argv] for cell in cells
        ]
        done = subprocess.run(
            [sys.executable, "-m", plan.module, CHECK],
            input=json.dumps(requests),
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(plan.threads)},
        )
        try:
            answers: list[dict[str, Any]] = json.loads(done.stdout.replace(runs, RUNS))
        except ValueError:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConfigurationError(
                f"python -m {plan.module} {CHECK} gave no answer: {reason}", key="module"
            ) from None
    return answers
