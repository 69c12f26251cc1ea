"""The source and the verdicts of one software."""

import importlib
import os
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from .importing import STUBS, unpack, wheel_source
from .setting import verdict


def examine(adapter: str, wheels: Path, snapshots: Path | None) -> dict[str, Any] | str:
    """The source and the verdicts of one software; a sentence where it is not there.

    To be called in a process of its own, as software that is imported changes what it finds there.

    Args:
        adapter: The name of its module in `adapters`.
        wheels: Where the wheels lie that are installed, for their dates.
        snapshots: Where git snapshots lie; None for none.
    """
    # torch.compile has nothing to gain here
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    module = importlib.import_module(f"benchmarks.peers.adapters.{adapter}")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silence:
        # It warns on every call of what it is not used to
        if hasattr(module, "REPOSITORY"):
            if snapshots is None:
                return "left out, as no folder of snapshots is given (PEERS_GIT)"
            source = unpack(snapshots, module.REPOSITORY, module.FOLDERS, Path(folder))
            if source is None:
                return f"left out, as {snapshots} has no snapshot of {module.REPOSITORY}"
            sys.path[:0] = [str(Path(folder) / path) for path in module.PATHS]
        else:
            try:
                source = wheel_source(module.DISTRIBUTION, wheels)
            except PackageNotFoundError:
                return f"left out, as {module.DISTRIBUTION} is not installed"
        with redirect_stdout(silence), redirect_stderr(silence):
            losses, failures = _certified(module)
    return {**source._asdict(), "stubs": sorted(STUBS.names), "losses": losses, "failures": failures}


def _certified(module: Any) -> tuple[dict[str, Any], list[str]]:
    """The verdicts of an adapter's losses by name, and what went wrong."""
    losses, failures = {}, []
    try:
        for setting in module.settings():
            try:
                losses[setting.name] = verdict(setting)
            except Exception as error:  # other software may raise anything
                failures.append(f"{setting.name}: {type(error).__name__}: {error}")
    except Exception:
        failures.append(traceback.format_exc(limit=-2).replace("\n", " | "))
    return losses, failures
