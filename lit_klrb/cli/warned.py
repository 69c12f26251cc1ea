"""Suppression of banners and of repeated or intended warnings."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lit_klrb.models.loading import silence


def quiet() -> None:
    """Suppress hardware banners, and warnings about choices that are made on purpose."""
    # Lightning uses deprecated names of jsonargparse
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    silence()
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for hint in (
        ".*does not have many workers.*",  # the model is the bottleneck; loaders run in the main process
        ".*module\\(s\\) in eval mode.*",  # the reference, and the policy where dropout is off
        ".*dirpath has changed.*",  # a run directory may be moved, or its checkpoint evaluated elsewhere
        ".*exists and is not empty.*",  # a resumed run writes to the same directory
        ".*callbacks used to create the checkpoint.*",  # check_same_run checks which may differ
        ".*`srun` command is available.*",  # a machine with SLURM, on which a run need not be a job
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",  # Lightning's own use of torch
    ):
        warnings.filterwarnings("ignore", hint)


@contextmanager
def once_of_a_kind() -> Iterator[None]:
    """Show only the first warning from each line of code while the block runs.

    Python repeats warnings whose text differs, even if only in a number: thousands in a long run.
    """
    show = warnings.showwarning
    shown: set[tuple[type[Warning], str, int]] = set()

    def show_once(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **named: Any
    ) -> None:
        kind = category, filename, lineno
        if kind not in shown:
            shown.add(kind)
            show(message, category, filename, lineno, *rest, **named)

    warnings.showwarning = show_once
    try:
        yield
    finally:
        warnings.showwarning = show
