"""Imports runs of other software as the directory of a sweep."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from analysis.design.plan_file import read_checked
from analysis.imports.foreign import COLUMNS, COORDINATES, METRICS, LoggedRun, logged_runs
from analysis.results import Cell, Plan, Point, Primary, Stage, layout
from analysis.results.locked import IMPORTED, Stated, encode_plan, lock_document
from analysis.results.plan import CLOSED
from analysis.results.rules import check_plan, one_of
from analysis.results.store import digest, encode_result, error_lines, present
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import write_once

# The only stage of an imported sweep.
STAGE = "imported"
Place = tuple[str, int, int]


@dataclass(frozen=True, config=CLOSED, kw_only=True)
class Mapping(Stated):
    """The meaning of the columns of imported logs."""

    name: str  # name of the sweep in the report
    primary: Primary
    # Pattern of the paths of the logs if each run has its own, for example
    # "{arm}-{beta}-{replicate}/trainer_state.json"
    files: str | None = None
    setting: str = ""  # one sentence on the models, the data and the training

    def check(self) -> None:
        """Check the values beyond their types.

        Raises:
            ConfigurationError: If a key is not allowed or is missing.
        """
        for name in self.columns:
            one_of("columns", name, COLUMNS)
        for run, values in self.runs.items():
            for name in values:
                one_of(f"runs.{run}", name, (*COORDINATES, "seed"))
        for name in METRICS:
            if name not in self.columns:
                raise ConfigurationError(f"{name} is missing", key="columns")


def import_runs(source: Path, mapping_path: Path, output: Path) -> None:
    """Write the directory of a sweep from the logs of other software.

    The same import can be repeated. Files are never overwritten.

    Args:
        source: A log (.csv, .jsonl, .json), or the folder of the logs described by `files` in the mapping.
        mapping_path: The mapping, a YAML file.
        output: The directory to write.

    Raises:
        ConfigurationError: If logs or mapping cannot be used, or the directory has other content.
    """
    mapping = read_checked(mapping_path, Mapping, Mapping.check, "a mapping", Mapping)
    runs, logs = logged_runs(source, mapping.files, mapping.columns, mapping.runs)
    plan, placed = _planned(runs, mapping, mapping_path, output)
    names = [path.name if path == source else path.relative_to(source).as_posix() for path in logs]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in logs]
    origin = {
        "source": source.resolve().name,
        "files": dict(zip(names, hashes, strict=True)),
        "columns": mapping.columns,
        "runs": mapping.runs,
        **{key: unit for key in ("kl_unit", "reward_unit") if (unit := getattr(mapping, key)) is not None},
        **({} if mapping.incomplete == "withhold" else {"incomplete": mapping.incomplete}),
        **({"repeated_rows": repeated} if (repeated := sum(run.repeated for run in runs)) else {}),
    }
    cells = {point: _cell(plan, point, placed, origin) for point in plan.places}
    content = {"plan": plan.record(), IMPORTED: origin}
    documents = {output / layout.PLAN: encode_plan(lock_document(plan, content, list(cells.values())))}
    for point, run in placed.items():
        documents[layout.result_path(output, cells[point].id)] = encode_result(_result(cells[point], run))
    _write(output, documents)


def _planned(
    runs: Sequence[LoggedRun], mapping: Mapping, mapping_path: Path, output: Path
) -> tuple[Plan, dict[Place, LoggedRun]]:
    """The smallest plan that includes all runs, and the place of each run in it."""
    betas = {beta: index for index, beta in enumerate(sorted({run.beta for run in runs}))}
    replicates = _replicates(runs)
    placed = {(run.arm, betas[run.beta], replicates[run.beta, run.replicate]): run for run in runs}
    column = mapping.columns.get("arm", "arm")
    grid: Any = {
        "arms": {label: {column: label} for label in dict.fromkeys(run.arm for run in runs)},
        "beta": {index: beta for beta, index in betas.items()},
        "replicates": 1 + max(replicates.values()),
    }
    rest: Any = {"primary": mapping.primary, "module": STAGE, "setting": mapping.setting}
    try:
        plan = Plan(mapping.name, str(output), {STAGE: Stage("")}, grid, **rest)
        check_plan(plan)
    except (ValidationError, ConfigurationError) as error:
        text = error_lines(error)[0] if isinstance(error, ValidationError) else error
        raise ConfigurationError(f"{mapping_path}: {text}") from None
    return plan, placed


def _replicates(runs: Sequence[LoggedRun]) -> dict[tuple[float, str], int]:
    """The index of each replicate, by beta and name.

    A name is the same replicate at all betas. If no two betas have a name in common, the replicates of each
    beta are numbered separately.
    """
    names = {beta: {run.replicate for run in runs if run.beta == beta} for beta in {run.beta for run in runs}}
    everywhere = set().union(*names.values())
    apart = sum(map(len, names.values())) == len(everywhere)

    indices: dict[tuple[float, str], int] = {}
    for beta, named in names.items():
        # Numbers first, by value
        ordered = sorted(
            named if apart else everywhere,
            key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
        )
        position = {name: index for index, name in enumerate(ordered)}
        indices |= {(beta, name): position[name] for name in named}
    return indices


def _cell(plan: Plan, place: Place, placed: dict[Place, LoggedRun], origin: dict[str, Any]) -> Cell:
    arm, index, replicate = place
    point = Point(arm, plan.grid.beta[index], index, replicate)
    # A missing run has the seed of its pair
    pair = [(label, index, replicate) for label in (arm, *plan.grid.arms)]
    seed = next((placed[other].seed for other in pair if other in placed), 0)
    cell_id = digest({IMPORTED: origin, **point._asdict()})
    return Cell(cell_id, STAGE, point, seed, overrides=plan.grid.arms[arm])


def _result(cell: Cell, run: LoggedRun) -> dict[str, Any]:
    final = run.final
    logged = {f"train/{name}": values for name, values in run.curves.items() if len(values) > 1}
    return {
        "schema": layout.RESULT_SCHEMA,
        "id": cell.id,
        "cell": cell.record(),
        "state": schema.DONE if final else schema.DIVERGED,
        "final": final or {},
        "curves": {
            name: {
                "step": sorted(values),
                "value": [values[step] if math.isfinite(values[step]) else None for step in sorted(values)],
            }
            for name, values in logged.items()
        },
        "versions": {},
    }


def _write(output: Path, documents: dict[Path, bytes]) -> None:
    """Write the files that do not exist yet; refuse a directory with other content."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        there = [present(output / layout.PLAN), *layout.result_paths(output)]
        if not all(path.is_file() and path.read_bytes() == documents.get(path) for path in there):
            raise ConfigurationError(f"{output} holds something else; name a new directory", key="--output")
    for path, content in documents.items():
        write_once(path, content)
