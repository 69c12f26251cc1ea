"""Expands a plan to its cells, the runs of a sweep. A cell's id is a hash of what its result depends on."""

import hashlib
import json
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from analysis.design.fingerprint import environment, read_config, semantic, with_contents
from analysis.results import Cell, Plan, Point, layout
from analysis.results.checksum import digest
from analysis.results.plan import BETA, SEED
from lit_klrb import schema

# Placeholder for the sweep's directory in the arguments of a cell, as results do not depend on it.
RUNS = "{runs}"


class Expansion(NamedTuple):
    """The cells of a plan in the order in which they should run, and the content that their ids hash."""

    cells: list[Cell]
    content: dict[str, Any]


def cell_seed(root: int, stage: str, *address: int) -> int:
    """The seed of a cell, which depends on its stage, beta and replicate but not on its arm.

    Runs that differ only in the arm therefore share their random numbers and are matched pairs; pairs at
    different betas or replicates are independent. As the name of the stage and the index of beta determine
    the seed, adding a stage or a beta does not change other seeds.

    Args:
        root: The plan's root seed.
        stage: The stage's name.
        address: Index of beta and replicate; empty for a cell outside the grid.

    Returns:
        A seed in [0, 2**32), the range of `--seed_everything`.

    Example:
        >>> len({cell_seed(0, "rloo", beta, replicate) for beta in range(6) for replicate in range(10)})
        60
    """
    stage_key = int.from_bytes(hashlib.sha256(stage.encode()).digest()[:4], "big")
    return int(np.random.SeedSequence(root, spawn_key=(stage_key, *address)).generate_state(1)[0])


def expand(plan: Plan) -> Expansion:
    """All cells of a plan: the shared stages, then the grid.

    The grid is ordered by replicate, then beta, then arm. A sweep that is stopped early therefore has
    complete matched pairs, and slow changes of the machine affect all arms equally.

    Raises:
        ConfigurationError: If a stage's configuration cannot be read.
    """
    configs = {name: read_config(stage.config, stage.overrides) for name, stage in plan.stages.items()}
    commands = sorted({stage.command for stage in plan.stages.values()})
    settings = [*configs.values(), *plan.grid.arms.values()]
    surroundings = environment(plan.module, plan.threads, commands, settings)
    hashed = {
        name: with_contents(semantic(config, plan.stages[name].inputs)) for name, config in configs.items()
    }
    ids: dict[str, str] = {}
    cells: list[Cell] = []

    def add(stage: str, point: Point | None) -> None:
        identity = {"config": hashed[stage], "environment": surroundings}
        cells.append(_cell(plan, stage, point, configs[stage], ids, identity))

    *shared, last = plan.stages
    for stage in shared:
        add(stage, None)
        ids[stage] = cells[-1].id
    grid = product(range(plan.grid.replicates), plan.grid.beta.items(), plan.grid.arms)
    for replicate, (index, beta), arm in grid:
        add(last, Point(arm, beta, index, replicate))
    return Expansion(cells, {"configs": hashed, "environment": surroundings})


def _cell(
    plan: Plan,
    name: str,
    point: Point | None,
    config: dict[str, Any],
    ids: dict[str, str],
    identity: dict[str, Any],
) -> Cell:
    address = () if point is None else (point.beta_index, point.replicate)
    seed = cell_seed(plan.root_seed, name, *address)
    overrides = {} if point is None else plan.grid.overrides(point.arm, point.beta_index)
    changed = {SEED: seed, **overrides, **({} if point is None else {BETA: point.beta})}
    inputs = {key: ids[source] for key, source in plan.stages[name].inputs.items()}
    # The label of an arm is not part of the id, as it has no effect on the result
    cell_id = digest({**identity, "overrides": with_contents(changed), "inputs": inputs})
    arguments = {
        "config": f"{RUNS}/{layout.CELLS}/{cell_id}/{layout.STAGE}",
        **changed,
        "trainer.default_root_dir": f"{RUNS}/{layout.CELLS}/{cell_id}",
        **{key: f"{RUNS}/{layout.CELLS}/{source}/{schema.CHECKPOINT}" for key, source in inputs.items()},
    }
    return Cell(
        id=cell_id,
        stage=name,
        point=point,
        seed=seed,
        needs=tuple(dict.fromkeys(inputs.values())),
        argv=(
            plan.stages[name].command,
            *(part for key, value in arguments.items() for part in (f"--{key}", _argument(value))),
        ),
        overrides=overrides,
        config=config,
    )


def _argument(value: Any) -> str:
    """A value as a command-line argument, which is parsed as YAML, of which JSON is a subset."""
    return value if isinstance(value, str) else json.dumps(value)
