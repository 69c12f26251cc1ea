"""Trainer options that would train nothing or not do what their name says, and a default on GPUs."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator, MPSAccelerator

from lit_klrb.errors import ConfigurationError


class Rule(NamedTuple):
    """The allowed values of an option: a predicate and its description."""

    allows: Callable[[Any], bool]
    description: str


def _names_devices(value: Any) -> bool:
    """Whether a number or a list of devices, maybe as text, names one at least."""
    if isinstance(value, str):
        is_list = re.fullmatch(r"\s*(-1|\d+(\s*,\s*\d+)*)\s*,?\s*", value) is not None
        return value == "auto" or (value.strip() not in ("0", "") and is_list)
    return value is None or (value == -1 or value > 0 if isinstance(value, int) else bool(value))


def _is_time(value: Any) -> bool:
    """Whether a value is null or a time above 0 that Lightning's timer can read."""
    if isinstance(value, str):
        return (
            re.fullmatch(r"\s*\d+(:\d\d){3}\s*", value) is not None and re.search("[1-9]", value) is not None
        )
    with contextlib.suppress(TypeError, OverflowError):
        return value is None or (timedelta(**value) if isinstance(value, Mapping) else value) > timedelta(0)
    return False


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: value is None or value >= least


INFINITE = "training data are infinite, and max_steps ends training"
RULES = {
    "max_steps": Rule(_at_least(1), "must be at least 1: training data are infinite"),
    "devices": Rule(_names_devices, "must be auto, a number of devices, or their indices"),
    "max_epochs": Rule(lambda value: value in (None, -1), f"must be null: {INFINITE}"),
    "min_epochs": Rule(lambda value: value is None or value <= 1, f"must be null: {INFINITE}"),
    # The integer 1 means one batch, 1.0 all batches
    "limit_train_batches": Rule(
        lambda value: value is None or (isinstance(value, float) and value == 1.0),
        f"must be null or 1.0, or training would repeat the same batches: {INFINITE}",
    ),
    "overfit_batches": Rule(
        lambda value: value == 0, f"must be 0, or training would repeat a few batches: {INFINITE}"
    ),
    "val_check_interval": Rule(
        lambda value: value == 1.0 if isinstance(value, float) else not isinstance(value, int) or value >= 1,
        "must be a number of steps, at least 1, or a duration: infinite data have no fractions",
    ),
    "check_val_every_n_epoch": Rule(_at_least(1), "must be null or at least 1"),
    "accumulate_grad_batches": Rule(_at_least(1), "must be at least 1"),
    "log_every_n_steps": Rule(_at_least(0), "must be 0 or larger"),
    "num_sanity_val_steps": Rule(_at_least(-1), "must be -1, 0 or larger"),
    "max_time": Rule(_is_time, "must be null, or above 0 as days:hours:minutes:seconds, such as 00:01:30:00"),
    "precision": Rule(
        lambda value: value != "16-true",
        "must not be 16-true, in which Adam's epsilon is 0: use 16-mixed, bf16-true or 32-true",
    ),
    "strategy": Rule(
        lambda value: not str(value).endswith(("spawn", "fork", "notebook")),
        "must start processes by a command, as ddp does",
    ),
    # Without a launcher on each, which tells them of each other, every node would wait for the others
    "num_nodes": Rule(
        lambda value: value in (None, 1) or bool({"MASTER_ADDR", "SLURM_NTASKS"} & {*os.environ}),
        "must be 1 without a launcher such as torchrun or Slurm on every node",
    ),
    "callbacks": Rule(
        lambda value: not re.search("LearningRateFinder|BatchSizeFinder", str(value)),
        "must have no LearningRateFinder and no BatchSizeFinder: the schedule would not keep what they find, "
        "and no configuration would record it; try rates in a sweep (docs/compare.md)",
    ),
    "gradient_clip_val": Rule(
        lambda value: value is None or 0 <= value < math.inf, "must be null, or finite and 0 or larger"
    ),
}


def check_training_options(options: Mapping[str, Any]) -> None:
    """Check options of the trainer.

    Example:
        >>> check_training_options({"max_steps": 5, "limit_train_batches": 1.0})
        >>> check_training_options({"max_steps": 5, "limit_train_batches": 1})
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: limit_train_batches: must be null or 1.0, ...
    """
    for name, rule in RULES.items():
        if name in options and not rule.allows(options[name]):
            callbacks = isinstance(options[name], list) and options[name]  # named by the rule
            actual = "" if callbacks else f", got {options[name]}"
            raise ConfigurationError(f"{rule.description}{actual}", key=name)


def check_accelerator(name: Any) -> None:
    """Check that this machine has an accelerator."""
    known = AcceleratorRegistry.items()
    available = ["auto", *sorted(name for name, entry in known if entry["accelerator"].is_available())]
    if {"cuda", "mps"} & {*available}:
        available.append("gpu")
    if isinstance(name, str) and name not in available:
        problem = f"{name!r} is not available; this machine has {', '.join(available)}"
        raise ConfigurationError(problem, key="accelerator")


def check_precision(options: Any) -> None:
    """Check that a trainer has a GPU for 16-mixed, in whose place Lightning would take another precision.

    Args:
        options: The trainer's, with the attributes `accelerator` and `precision`.
    """
    auto, gpus = (
        options.accelerator == "auto",
        CUDAAccelerator.is_available() or MPSAccelerator.is_available(),
    )
    if str(options.precision) in ("16", "16-mixed") and (options.accelerator == "cpu" or (auto and not gpus)):
        problem = f"{options.precision} needs a GPU; use bf16-mixed or 32-true"
        raise ConfigurationError(problem, key="precision")


def prefer_determinism(options: Any) -> None:
    """Ask for deterministic algorithms on a GPU where the option is null: else no run resumes bit for bit.

    Args:
        options: The trainer's, with the attributes `accelerator` and `deterministic`, which is set.
    """
    is_gpu = options.accelerator in ("auto", "cuda", "gpu") and CUDAAccelerator.is_available()
    if options.deterministic is None and is_gpu:
        options.deterministic = True
        # Filling memory finds errors in torch, and takes time
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
