"""Bitwise comparison of two runs, and detection of damaged files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from analysis.sweep.job import curves
from lit_klrb import schema
from lit_klrb.run.checkpoints import damage, read


@dataclass
class Outcome:
    """The outcome of a run or a sweep.

    Args:
        what: The stage that was trained, or the workers of a sweep.
        kills: How often SIGKILL ended it.
        in_write: How many of them came between the begin of a checkpoint's save and its rename.
        resumed: Runs, or cells of the sweep, that went on from a checkpoint and did not start anew.
        problems: Torn files, differences from the undisturbed one, unexpected ends.
    """

    what: str
    kills: int = 0
    in_write: int = 0
    resumed: int = 0
    problems: list[str] = field(default_factory=list)


def differences(first: Any, other: Any, place: str = "") -> Iterator[str]:
    """Places where two checkpoints differ, bit for bit."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in {**first, **other}:
            if key in first and key in other:
                yield from differences(first[key], other[key], f"{place}/{key}")
            else:
                yield f"{place}/{key}"
    elif isinstance(first, list | tuple) and isinstance(other, list | tuple):
        yield from differences(dict(enumerate(first)), dict(enumerate(other)), place)
    elif isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        if first.dtype != other.dtype or not torch.equal(first, other):
            yield place
    elif repr(first) != repr(other):  # NaN is NaN
        yield place


def trained(run: Path) -> dict[str, Any]:
    """The content of a run's last checkpoint, without the run's id, its path and the loops' counts."""
    checkpoint = read(run / schema.CHECKPOINT)
    kept = {key: value for key, value in checkpoint.items() if key not in ("run", "loops", "epoch")}
    callbacks = {k: v for k, v in kept["callbacks"].items() if not k.startswith("RunCheckpoint")}
    return kept | {"callbacks": callbacks}


def different(first: Path, other: Path) -> list[str]:
    """Differences of two run directories: weights, optimizer, schedule, rollout, metrics, summary."""
    found = list(differences(trained(first), trained(other)))
    if curves(first / schema.METRICS_DIR) != curves(other / schema.METRICS_DIR):
        found.append(schema.METRICS_DIR)
    if (first / schema.SUMMARY).read_bytes() != (other / schema.SUMMARY).read_bytes():
        found.append(schema.SUMMARY)
    return found


def torn(run: Path) -> list[str]:
    """Incomplete files of a run with their final names."""
    found = [f"{path}: {damage(path)}" for path in run.glob("checkpoints/*.ckpt") if damage(path)]
    for path in (run / name for name in (schema.RUN, schema.CONFIG, schema.SUMMARY)):
        if path.exists():
            text = path.read_text()
            try:
                whole = isinstance(yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text), dict)
            except (ValueError, yaml.YAMLError):
                whole = False
            if not whole:
                found.append(str(path))
    return found
