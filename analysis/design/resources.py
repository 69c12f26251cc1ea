"""What a cell needs of a machine: processes, GPUs of its own. Results do not depend on which GPU it gets."""

import functools
import os
from pathlib import Path
from typing import Any

from analysis.results import Cell, Plan
from lit_klrb.errors import ConfigurationError, refusing

# The variable by which CUDA and ROCm show a process some of a machine's GPUs.
VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = "trainer.devices"


def processes_of(cell: Cell) -> int:
    """Number of processes in which a cell trains, by its setting `trainer.devices`.

    Raises:
        ConfigurationError: If the machine would decide, as the batch of all processes depends on it.
    """
    devices = _setting(cell, DEVICES)
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part] if "," in devices else devices.strip()
    if devices in ("auto", "-1", -1):
        text = f"{devices!r} is not allowed in a plan; the number of processes, on which results depend"
        raise ConfigurationError(text, key=DEVICES)
    with refusing(f"{devices!r} is no number and no list of devices", TypeError, ValueError, key=DEVICES):
        return len(devices) if isinstance(devices, list) else int(devices or 1)


def gpus_of(plan: Plan, cell: Cell) -> int:
    """Number of GPUs of its own that a cell gets: its stage's `gpus`.

    By default one per process, where `trainer.accelerator` is a GPU, or may be one and this machine has one.
    """
    if (gpus := plan.stage_of(cell.stage).gpus) is not None:
        return gpus
    accelerator = _setting(cell, "trainer.accelerator") or "auto"
    trains_there = accelerator in ("gpu", "cuda") or (accelerator == "auto" and bool(visible_gpus()))
    return processes_of(cell) if trains_there else 0


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as values of `CUDA_VISIBLE_DEVICES`, without asking a driver."""
    declared = os.environ.get(VISIBLE)
    if declared is not None:
        # What follows a negative index is not visible
        names = [name.strip() for name in declared.split(",")]
        return names[: next((at for at, name in enumerate(names) if not name or name[0] == "-"), len(names))]
    return [str(index) for index in range(_installed())]


@functools.cache
def _installed() -> int:
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def _setting(cell: Cell, key: str) -> Any:
    node: Any = cell.config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return cell.overrides.get(key, node)
