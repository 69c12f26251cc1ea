"""The checkpoint that a command starts from, and whether its run is the one of the settings."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lit_klrb.errors import ConfigurationError
from lit_klrb.run.checkpoints import last_intact
from lit_klrb.run.same_run import check_same_run, run_of
from lit_klrb.terminal import say_once

# The value of --ckpt_path that continues the run of the directory, if there is one.
AUTO = "auto"


def resumed_run(config: Namespace, command: str, record: Callable[[], dict[str, Any]]) -> str | None:
    """The id of the run that `fit` resumes; None for a new run. Replaces "auto" by a path, or by None.

    Args:
        config: The settings of the command.
        command: Its name.
        record: Returns what a resumed run is compared by.

    Raises:
        ConfigurationError: If there is no such checkpoint, or the settings are not those of its run.
    """
    path, is_fit = config.get("ckpt_path"), command == "fit"
    # Whether SLURM runs this job again, after a preemption, the loss of a node or `Stopped.requeued`
    again = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    automatic = is_fit and (path == AUTO or (path is None and again))
    if automatic:
        root = Path(config.trainer.default_root_dir)
        path = config["ckpt_path"] = last_intact(root)
        if path is None:
            say_once(f"--ckpt_path {AUTO}: no checkpoint in {root}, so the run starts at its first step")
    if path is None:
        return None
    if not Path(path).is_file():
        raise ConfigurationError(f"{path} does not exist", key="ckpt_path")
    if not is_fit:
        return None
    try:
        run = run_of(path)
        check_same_run(path, run, record())
    except ConfigurationError as error:
        if not automatic:
            raise
        say_once(f"--ckpt_path {AUTO}: another run starts, as {error}")
        config["ckpt_path"] = None
        return None
    if automatic:
        say_once(f"--ckpt_path {AUTO}: resuming {path}")
    run_id: str = run["id"]
    return run_id
