"""From a plan to its cells: the runs of a sweep, each with an id that says what its result depends on."""

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

# Stands for the sweep's directory in the arguments of a cell: a result must not depend on where it was made.
RUNS = "{runs}"


class Expansion(NamedTuple):
    """The cells of a plan in the order they should run, and everything that was hashed into their ids."""

    cells: list[Cell]
    content: dict[str, Any]


def cell_seed(root: int, stage: str, *address: int) -> int:
    """The seed of a cell, from where it stands in the plan and never from its arm.

    Runs that differ only in the arm share their random numbers: they are matched pairs, and pairs at
    different betas or replicates are independent. The stage enters by its name and beta by its index, so
    neither a new stage nor a new beta moves another cell's seed.

    Args:
        root: The plan's root seed.
        stage: The stage's name.
        address: Index of beta and replicate; nothing for a cell outside the grid.

    Returns:
        A seed in [0, 2**32), as `--seed_everything` takes.

    Example:
        >>> len({cell_seed(0, "rloo", beta, replicate) for beta in range(6) for replicate in range(10)})
        60
    """
    stage_key = int.from_bytes(hashlib.sha256(stage.encode()).digest()[:4], "big")
    return int(np.random.SeedSequence(root, spawn_key=(stage_key, *address)).generate_state(1)[0])


def expand(plan: Plan) -> Expansion:
    """All cells of a plan: the shared stages first, then the grid.

    The grid is ordered replicate by replicate, and within one beta by beta with the arms next to each other:
    a sweep stopped early has complete matched pairs, and drift of the machine meets all arms alike.

    Raises:
        ConfigurationError: If a stage's configuration cannot be read.
    """
    surroundings = environment(plan.module, plan.threads)
    configs = {name: read_config(stage.config, stage.overrides) for name, stage in plan.stages.items()}
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
    overrides = {} if point is None else plan.grid.arms[point.arm]
    changed = {SEED: seed, **overrides, **({} if point is None else {BETA: point.beta})}
    inputs = {key: ids[source] for key, source in plan.stages[name].inputs.items()}
    # What an arm is called is no part of what it does.
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
        argv=("fit", *(part for key, value in arguments.items() for part in (f"--{key}", _argument(value)))),
        overrides=overrides,
        config=config,
    )


def _argument(value: Any) -> str:
    """A value as the command line takes it, which reads YAML: JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value)
