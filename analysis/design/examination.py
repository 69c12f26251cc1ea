"""Checks that the cells of a plan can start, and which objective each arm optimises.

This process never imports torch: `python -m MODULE check` builds what every stage and every arm would train.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from analysis.design.cells import RATE, RUNS
from analysis.results import Cell, Plan, layout
from analysis.results.keys import SEED
from analysis.results.records import Arm
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

CHECK = "check"
# The setting of a reference that follows the policy
MOVES = "model.reference_update"


def examine(plan: Plan, cells: Sequence[Cell]) -> dict[str, Arm]:
    """Check every stage, and every arm in each block and at each beta where it changes other values.

    The first cell there stands for the others, and for those of other warm starts that differ in seeds alone.

    Returns:
        The estimator and evaluation of each arm, by label.

    Raises:
        ConfigurationError: If a stage, a block or an arm would be refused; one line on the first of them.
    """
    first: dict[tuple[str, str, str], Cell] = {}
    for cell in cells:
        if cell.trial is not None:  # as in the grid, but for the rate
            continue
        block = plan.grid.block_of(cell.point.replicate) if cell.point else ""
        setting = f"grid.arms.{cell.point.arm}" if cell.point else f"stages.{cell.stage}"
        first.setdefault((setting, block, json.dumps(cell.overrides, sort_keys=True)), cell)
    distinct, places = _distinct([*first.values()])
    given = _ask(plan, distinct)
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    for (setting, block, _), place in zip(first, places, strict=True):
        answer = given[place]
        if setting.startswith("grid.") and answer.get("evaluation", {}).get(schema.LIMIT_VAL_BATCHES) == 0:
            answer = {"error": f"{schema.LIMIT_VAL_BATCHES}: must not be 0, as evaluations are the results"}
        if "error" in answer or (setting, block) not in answers:
            answers[setting, block] = answer
    _refuse(plan, {where: answer["error"] for where, answer in answers.items() if "error" in answer})
    block = plan.grid.block_of(0)
    arms = {label: answers[f"grid.arms.{label}", block] for label in plan.grid.arms}
    for label, overrides in plan.grid.arms.items():
        unread = tuple(arms[label].get("unread", ()))
        if ignored := [key for key in overrides if key.startswith(unread)]:
            problem = f"{arms[label]['module']} uses no KL estimator, so it ignores {', '.join(ignored)}"
            raise ConfigurationError(problem, key=f"grid.arms.{label}")
    _refuse_moving(plan, arms)
    control = arms[plan.primary.control]["evaluation"]
    return {label: _arm(answer, control) for label, answer in arms.items()}


def _distinct(cells: Sequence[Cell]) -> tuple[list[Cell], list[int]]:
    """The cells but those that differ from an earlier one, or start from cells that do, in seeds alone.

    Returns:
        The cells, and for each cell given the place of the one that stands for it.
    """
    distinct: list[Cell] = []
    places: list[int] = []
    known: dict[str, int] = {}
    names: dict[str, str] = {}
    for cell in cells:
        needs = tuple(names.get(name, name) for name in cell.needs)
        argv = cell.argv
        for name, other in zip(cell.needs, needs, strict=True):
            argv = tuple(word.replace(name, other) for word in argv)
        seed = argv.index(f"--{SEED}")
        content = [argv[:seed], argv[seed + 2 :], cell.config]
        place = known.setdefault(json.dumps(content, default=str).replace(cell.id, ""), len(distinct))
        if place == len(distinct):
            distinct.append(replace(cell, argv=argv, needs=needs))
        names[cell.id] = distinct[place].id
        places.append(place)
    return distinct, places


def _refuse_moving(plan: Plan, arms: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse J of arms whose references follow each its own policy, unless that is what an arm changes."""
    moving = [label for label, answer in arms.items() if answer.get("moves_reference")]
    keys = {key for overrides in plan.grid.arms.values() for key in overrides}
    if moving and plan.primary.outcome == "objective" and MOVES not in keys:
        problem = "every run is trained with a KL to a reference of its own, so J = reward − β·KL is no run's"
        remedy = "set it in an arm, if it is what you compare, or leave it out"
        raise ConfigurationError(f"{MOVES}: {problem} objective: {remedy}", key=f"grid.arms.{moving[0]}")


def _refuse(plan: Plan, errors: Mapping[tuple[str, str], str]) -> None:
    """Raise the first error; if every arm has it, it is attributed to the block, or to all blocks."""
    if not errors:
        return
    (setting, block), error = next(iter(errors.items()))
    alike = {where for where, other in errors.items() if other == error}
    arms = [f"grid.arms.{label}" for label in plan.grid.arms]
    everywhere = {*product(arms, plan.grid.blocks or [""])}
    if len(everywhere) > 1 and everywhere <= alike:
        setting = f"stages.{list(plan.stages)[-1]}"
    elif block and {*product(arms, [block])} <= alike:
        setting = f"grid.blocks.{block}"
    raise ConfigurationError(error, key=setting)


def _arm(answer: Mapping[str, Any], control: Mapping[str, Any]) -> Arm:
    estimator, evaluation = answer["estimator"] or {}, answer["evaluation"]
    keys = sorted(key for key in {**control, **evaluation} if evaluation.get(key) != control.get(key))
    return Arm(
        answer["module"],
        estimator.get("name"),
        estimator.get("optimises"),
        estimator.get("biased") is True,  # rather than by what corrects later steps, which `optimises` says
        {key: [evaluation.get(key), control.get(key)] for key in keys},
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
