"""Sweep directories with known outcomes."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785

from analysis.design.cells import cell_id, cell_seed
from analysis.results import Block, Cell, Grid, Plan, Primary, Stage
from analysis.results.keys import BETA, SEED
from analysis.results.locked import encode_plan, lock_document

ESTIMATORS = ("MonteCarlo", "RaoBlackwell")
BETAS = {0: 0.05, 1: 0.1, 2: 0.2}


def digest(content: object) -> str:
    return hashlib.sha256(rfc8785.dumps(content)).hexdigest()


def publish(folder: Path, result: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['id']}.json"
    body = {key: value for key, value in result.items() if key != "checksum"}
    path.write_bytes(rfc8785.dumps({**body, "checksum": digest(body)}))
    return path


def grid_results(runs: Path, arm: str | None = None) -> dict[tuple[str, int, int], dict]:
    """The content of the published results of the grid, or of an arm, by (arm, beta index, replicate)."""
    found = {}
    for path in sorted((runs / "results").glob("*.json")):
        content = json.loads(path.read_bytes())
        where = content["cell"]
        if where["arm"] and arm in (None, where["arm"]):
            found[where["arm"], where["beta_index"], where["replicate"]] = content
    return found


def cell(stage: str, point: tuple[str, int, int] | None = None, *, betas=BETAS, seed=None, needs=()) -> dict:
    estimator, level, replicate = point or (None, None, None)
    default = cell_seed(0, stage, *(() if point is None else (level, replicate)))
    return {
        "stage": stage,
        "arm": estimator,
        "beta": None if level is None else betas[level],
        "beta_index": level,
        "replicate": replicate,
        "seed": default if seed is None else seed,
        "needs": list(needs),
        "argv": ["fit"],
        "overrides": {} if estimator is None else {"kl.estimator": estimator},
    }


def id_of(where: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> str:
    """The id of a cell, as its plan gives it."""
    at = where.get("trial") or where
    changed = {
        SEED: where["seed"],
        **where["overrides"],
        **({} if at["beta"] is None else {BETA: at["beta"]}),
    }
    inputs = dict(zip(("reference", "policy"), where["needs"], strict=False)) if at["arm"] else {}
    identity = {"config": dict(config or {}), "environment": {"threads": 1}}
    return cell_id(identity, changed, inputs, where.get("tuned_by", ""))


def result(
    where: Mapping[str, Any], final: Mapping[str, Any], *, state="done", curves=None, config=None
) -> dict:
    return {
        "schema": 1,
        "id": id_of(where, config),
        "cell": dict(where),
        "state": state,
        "final": dict(final),
        "curves": curves or {},
        "versions": {"lit_klrb": "0.1", "torch": "2.13"},
    }


def draw_curve(rng: np.random.Generator, last: float, *, steps: int = 20, start: float = 0.0) -> dict:
    path = start + (last - start) * (1 - np.exp(-np.arange(steps) / 5)) + 0.02 * rng.normal(size=steps)
    return {"step": list(range(steps)), "value": [float(value) for value in path]}


def settle(made: dict) -> dict:
    """The result of a run, with its outcome as its last evaluation."""
    for key, value in made["final"].items():
        if f"val/{key}" in made["curves"]:
            made["curves"][f"val/{key}"]["value"][-1] = value
    return made


def rolled_out(made: dict, before: Mapping[str, Any]) -> None:
    """Scale the rollouts of a run whose outcome was edited, so that they end as it does."""
    for key in ("reward", "kl"):
        curve, now = made["curves"].get(f"train/{key}"), made["final"].get(key)
        if curve and isinstance(now, float) and now != before[key]:
            first = curve["value"][0]
            scale = (now - first) / (before[key] - first)
            curve["value"] = [first + (value - first) * scale for value in curve["value"]]


def outcome(rng: np.random.Generator, beta: float, lift: float, luck: float) -> dict[str, float]:
    kl = 0.3 / beta * np.exp(0.1 * (luck + rng.normal()))
    reward = np.sqrt(kl) + 0.1 * (luck + rng.normal()) + lift
    return {"reward": float(reward), "reward_se": 0.03, "kl": float(kl), "kl_se": 0.05, "length": 20.0}


def write_sweep(
    runs: Path,
    *,
    estimators=ESTIMATORS,
    betas=BETAS,
    replicates: int = 4,
    lift: Mapping[str, float] | None = None,
    edit: Callable[[tuple[str, int, int], dict], dict | None] = lambda point, made: made,
    primary: Mapping[str, Any] | None = None,
    setting: str = "",
    studied: Sequence[float] = (),
    blocks: int = 0,
    config: Mapping[str, Any] | None = None,
    tuned_by: Mapping[str, str] | None = None,
) -> Path:
    """A sweep's directory; `edit` may change a result or withhold it by returning None.

    With blocks, the warm start of block b is the stage dpo-b.
    """
    rng = np.random.default_rng(0)
    reference = result(cell("sft"), {"loss": 2.0})
    start = result(
        cell("dpo", needs=[reference["id"]]),
        {"reward": 0.5, "reward_se": 0.02, "kl": 0.4, "kl_se": 0.01},
        curves={
            "val/kl": {"step": [0, 9], "value": [0.0, 0.4]},
            "val/reward": {"step": [0, 9], "value": [0.1, 0.5]},
        },
    )
    made = [reference, start]
    starts = [
        result(cell(f"dpo-{b}", needs=[reference["id"]]), {**start["final"], "reward": 0.5 + b / 10})
        for b in range(blocks)
    ]
    made += starts
    for beta in studied:
        run = result(cell(f"study-{beta:g}"), {"reward": 0.7, "kl": 0.5})
        made.append({**run, "studies": studies(beta)})
    for replicate in range(replicates):
        for level, beta in betas.items():
            luck = rng.normal()
            for name in estimators:
                point = (name, level, replicate)
                final = outcome(rng, beta, (lift or {}).get(name, 0.0), luck)
                own = starts[replicate % blocks] if blocks else start
                where = cell("rloo", point, betas=betas, needs=[reference["id"], own["id"]])
                where |= {"tuned_by": tuned_by[name]} if tuned_by else {}
                curves = {
                    f"{source}/{key}": draw_curve(rng, final[key], steps=steps, start=0.4)
                    for source, steps in (("train", 20), ("val", 5))
                    for key in ("reward", "kl")
                }
                for key in ("reward", "kl"):  # all runs of a block have one start
                    curves[f"val/{key}"]["value"][0] = 0.4 + 0.1 * (replicate % max(1, blocks))
                made.append(result(where, final, curves=curves, config=config))
    write_plan(runs, made, estimators, betas, replicates, primary, setting, blocks, config)
    for content in made:
        place = content["cell"]
        point = (place["arm"], place["beta_index"], place["replicate"])
        before = dict(content["final"])
        kept = edit(point, content) if place["arm"] else content
        if kept is not None and place["arm"]:
            rolled_out(kept, before)
        if kept is not None:
            publish(runs / "results", settle(kept) if place["arm"] else kept)
    return runs


def write_plan(
    runs: Path, made, estimators, betas, replicates, primary, setting="", blocks=0, config=None
) -> None:
    chosen = {"control": estimators[0], **(primary or {})}
    warm = [f"dpo-{b}" for b in range(blocks)]
    studies = [one["cell"]["stage"] for one in made if "studies" in one]
    stages = {name: Stage("") for name in ("sft", "dpo", *warm, *studies)}
    stages["rloo"] = Stage("", {"reference": "sft"} if blocks else {"reference": "sft", "policy": "dpo"})
    own = {name: Block(inputs={"policy": name}) for name in warm}
    grid = Grid(list(estimators), betas, replicates, own)
    plan = Plan("synthetic", "", stages, grid, Primary(**chosen), setting=setting)
    cells = [Cell.of_record(one["id"], one["cell"]) for one in made]
    runs.mkdir(parents=True, exist_ok=True)
    configs = {name: dict(config or {}) if name == "rloo" else {} for name in stages}
    content = {"plan": plan.record(), "configs": configs, "environment": {}}
    (runs / "plan.json").write_bytes(encode_plan(lock_document(plan, content, cells)))


def edit_plan(runs: Path, edit: Callable[[dict], None], *, rehash: bool = True) -> None:
    """Change plan.json by hand, with or without recomputing its hash."""
    document = json.loads((runs / "plan.json").read_text())
    edit(document)
    if rehash:
        document["hash"] = digest({key: value for key, value in document.items() if key != "hash"})
    (runs / "plan.json").write_text(json.dumps(document))


def diverge(*points: tuple[str, int, int]) -> Callable[[tuple[str, int, int], dict], dict]:
    """An edit for `write_sweep`: the runs at these places diverged."""

    def edit(point, made):
        if not points or point in points:
            made["state"] = "diverged"
            made["final"] = {"reward": None, "kl": None}
        return made

    return edit


def fail(runs: Path, place: tuple[str, int, int], error: str = "Traceback\nOSError: disk full") -> None:
    """Record that a planned cell of the grid failed."""
    keys = ("arm", "beta_index", "replicate")
    cells = json.loads((runs / "plan.json").read_text())["cells"]
    (where,) = (dict(cell) for cell in cells if tuple(cell[key] for key in keys) == place)
    name = where.pop("id")
    (runs / "failed").mkdir(exist_ok=True)
    record = {"id": name, "cell": where, "attempts": 3, "error": error}
    (runs / "failed" / f"{name}.json").write_text(json.dumps(record))


def studies(beta: float, batches: int = 8, prompts: int = 6) -> dict[str, Any]:
    """Artifacts of studies: a Rao-Blackwell estimate with less spread, and gradients."""
    rng = np.random.default_rng(1)
    k1 = rng.normal(1.0, 1.0, (prompts, 10))
    gradients = rng.normal(size=(3 * batches, 30)) * np.repeat([1.0, 2.0, 1.5], batches)[:, None]
    gram = gradients @ gradients.T
    return {
        "estimation": {
            "schema": 2,
            "prompts": prompts,
            "completions": 10,
            "group_sizes": [1, 5],
            "snapshots": [
                {
                    "step": step,
                    "values": {"k1": k1.tolist(), "rb": (1 + (k1 - 1) / 4).tolist()},
                    "horvitz_thompson": {
                        str(size): k1.reshape(prompts, -1, size).mean(axis=2).tolist() for size in (1, 5)
                    },
                }
                for step in (0, 20)
            ],
        },
        "gradient_noise": {
            "schema": 2,
            "estimators": list(ESTIMATORS),
            "batches": batches,
            "prompts": 4,
            "snapshots": [
                {
                    "step": step,
                    "beta": beta,
                    "completions": 2,
                    "gram": [row[: i + 1].tolist() for i, row in enumerate(gram)],
                    "label": f"checkpoint {step}",
                }
                for step in (0, 10, 20)
            ],
        },
    }
