"""Expands a plan to its cells, the runs of a sweep. A cell's id is a hash of what its result depends on."""

import hashlib
import json
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from analysis.design.fingerprint import as_hashed, environment, read_config, semantic, with_contents
from analysis.design.resources import processes_of
from analysis.results import Cell, Plan, Point, Trial, layout
from analysis.results.keys import BETA, SEED, flat
from analysis.results.plan import TUNING
from analysis.results.store import digest
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError, concerning
from lit_klrb.redaction import environment_names, is_secret, resolved_with_environment

# Placeholders in the arguments of a cell: the sweep's directory, on which results do not depend, and the rate
# that is chosen for its arm.
RUNS, RATE = "{runs}", "{rate}"


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
    """All cells of a plan: the shared stages, the tuning stage, then the grid.

    The id of a cell of the grid has the ids of the trials of its arm, from whose results its rate follows, as
    it has the id of its warm start.

    The grid is ordered by replicate, then beta, then arm. A sweep that is stopped early therefore has
    complete matched pairs, and slow changes of the machine affect all arms equally.

    Raises:
        ConfigurationError: If a stage's configuration cannot be read, two blocks are the same, or a number of
            processes is not fixed.
    """
    configs = {name: read_config(stage.config, stage.overrides) for name, stage in plan.stages.items()}
    for name, config in configs.items():
        _check_secrets(name, config)
    values = {name: resolved_with_environment(config) for name, config in configs.items()}
    commands = sorted({stage.command for stage in plan.stages.values()})
    blocks = (block.overrides for block in plan.grid.blocks.values())
    settings = [*values.values(), *plan.grid.arms.values(), *blocks]
    surroundings = environment(plan.module, plan.threads, commands, settings)
    hashed = {
        name: as_hashed(with_contents(semantic(values[name], plan.stages[name].inputs)), config)
        for name, config in configs.items()
    }
    _check_blocks(plan)
    ids: dict[str, str] = {}
    cells: list[Cell] = []

    def add(stage: str, point: Point | Trial | None, tuned_by: str = "") -> None:
        machine = {**surroundings, "threads": plan.threads_of(stage)}
        identity = {"config": hashed[stage], "environment": machine}
        cells.append(_cell(plan, stage, point, configs[stage], ids, identity, tuned_by))
        with concerning(f"stages.{stage}"):
            processes_of(cells[-1])

    *shared, last = plan.stages
    for stage in shared:
        add(stage, None)
        ids[stage] = cells[-1].id
    for trial in plan.trials:
        add(last, trial)
    trials = {arm: [cell.id for cell in cells if cell.trial and cell.arm == arm] for arm in plan.grid.arms}
    grid = product(range(plan.grid.replicates), plan.grid.beta.items(), plan.grid.arms)
    for replicate, (index, beta), arm in grid:
        add(last, Point(arm, beta, index, replicate), digest(trials[arm]) if plan.tuning else "")
    return Expansion(cells, {"configs": hashed, "environment": surroundings})


def _check_secrets(stage: str, config: Mapping[str, Any]) -> None:
    """Raise an error for a password in a configuration, which each cell has a copy of."""
    for key, value in flat(config):
        if is_secret(key) and isinstance(value, str) and not environment_names(value):
            text = f"{key}: cells have copies of it; write ${{oc.env:NAME}} in place of its value"
            raise ConfigurationError(text, key=f"stages.{stage}")


def _check_blocks(plan: Plan) -> None:
    """Raise an error for two blocks whose files have the same content under other names."""
    blocks = plan.grid.blocks.items()
    contents = {label: {**with_contents(block.overrides), **block.inputs} for label, block in blocks}
    for (one, first), (other, second) in combinations(contents.items(), 2):
        if first == second:
            text = f"{one} and {other} name files with the same content; blocks differ in what they share"
            raise ConfigurationError(text, key="grid.blocks")


def cell_id(
    identity: Mapping[str, Any], changed: Mapping[str, Any], inputs: Mapping[str, str], tuned_by: str = ""
) -> str:
    """The id of a cell: a hash of what its result depends on.

    The label of an arm is not part of it, as it has no effect on the result.

    Args:
        identity: The configuration of its stage, `config`, and what it runs in, `environment`.
        changed: Configuration key -> the value that seed, beta, block and arm give it.
        inputs: Configuration key -> the id of the cell whose checkpoint it receives.
        tuned_by: Hash of the ids of the trials from which its rate is chosen; "" without tuning.
    """
    hashed = {**identity, "overrides": changed, "inputs": inputs}
    return digest({**hashed, "tuned_by": tuned_by} if tuned_by else hashed)


def _cell(
    plan: Plan,
    stage_of: str,
    at: Point | Trial | None,
    config: dict[str, Any],
    ids: dict[str, str],
    identity: dict[str, Any],
    tuned_by: str,
) -> Cell:
    stage = TUNING if isinstance(at, Trial) else stage_of
    address = () if at is None else (at.beta_index, at.replicate)
    seed = cell_seed(plan.root_seed, stage, *address)
    overrides = {} if at is None else plan.overrides(at)
    changed = {SEED: seed, **overrides, **({} if at is None else {BETA: at.beta})}
    sources = plan.stages[stage_of].inputs if at is None else plan.inputs(at.replicate)
    inputs = {key: ids[source] for key, source in sources.items()}
    name = cell_id(identity, with_contents(changed), inputs, tuned_by)
    arguments = {
        "config": f"{RUNS}/{layout.CELLS}/{name}/{layout.STAGE}",
        **changed,
        **({plan.tuning.key: RATE} if plan.tuning and tuned_by else {}),
        "trainer.default_root_dir": f"{RUNS}/{layout.CELLS}/{name}",
        **{key: f"{RUNS}/{layout.CELLS}/{source}/{schema.CHECKPOINT}" for key, source in inputs.items()},
    }
    # Arguments are parsed as YAML, of which JSON is a subset
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    argv = (
        plan.stages[stage_of].command,
        *(part for key, text in texts.items() for part in (f"--{key}", text)),
    )
    point, trial = at if isinstance(at, Point) else None, at if isinstance(at, Trial) else None
    needs = tuple(dict.fromkeys(inputs.values()))
    return Cell(name, stage, point, seed, needs, argv, overrides, config, trial, tuned_by)
