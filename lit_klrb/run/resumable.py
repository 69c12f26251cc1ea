"""Checks that a checkpoint has everything needed to resume a run, and nothing that was made up."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_klrb.errors import ConfigurationError

# The entries that Lightning restores. If they are missing, it would train from step 0 without an error.
PARTS: dict[str, type] = {
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "global_step": int,
    "epoch": int,
    "pytorch-lightning_version": str,
}
# Where Lightning counts the optimizer's steps.
STEPS = "epoch_loop.automatic_optimization.optim_progress"
# Settings of an optimizer that say how it computes, which depends on the device.
HOW = {"foreach", "fused"}
# What Adam keeps of each parameter.
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}


def check_resumable(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint is complete; one with weights only is not."""
    _refuse(path, _problems(checkpoint))


def check_states(
    path: str,
    checkpoint: Mapping[str, Any],
    optimizer: Optimizer,
    scheduler: LambdaLR,
    loop: Mapping[str, Any],
    max_steps: int,
) -> None:
    """Compare what a trainer is about to restore with what it has just built from the same settings.

    Args:
        path: The path of the checkpoint, for the error message.
        checkpoint: The content of the checkpoint.
        optimizer: The new optimizer, whose groups the checkpoint must have.
        scheduler: The new schedule of its learning rate.
        loop: The state of the trainer's loop before it is restored.
        max_steps: The last step of the run.
    """
    check_resumable(path, checkpoint)
    _refuse(path, _differences(checkpoint, optimizer, scheduler, loop, max_steps))


def _refuse(path: str, problems: Iterator[str]) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise ConfigurationError(
            f"{path} cannot be resumed: its {problem}; policy_path starts another run from its policy",
            key="ckpt_path",
        )


def _differences(
    checkpoint: Mapping[str, Any],
    optimizer: Optimizer,
    scheduler: LambdaLR,
    loop: Mapping[str, Any],
    max_steps: int,
) -> Iterator[str]:
    step = checkpoint["global_step"]
    if not 0 <= step <= max_steps:
        yield f"global_step is {step}, of {max_steps}"
    yield from _other_form("loops", checkpoint["loops"]["fit_loop"], loop)
    done = checkpoint["loops"]["fit_loop"][STEPS]["optimizer"]["step"]["total"]["completed"]
    if done != step:
        yield f"loops are at step {done}, but global_step is {step}"
    schedules, states = checkpoint["lr_schedulers"], checkpoint["optimizer_states"]
    if len(schedules) != 1 or len(states) != 1:
        yield f"lr_schedulers and optimizer_states must be one each, got {len(schedules)} and {len(states)}"
    for key, value in {"last_epoch": step, "_step_count": step + 1, "base_lrs": scheduler.base_lrs}.items():
        if schedules[0].get(key) != value:
            yield f"lr_schedulers have {key} {schedules[0].get(key)}, not {value}"
    state, own = states[0], optimizer.state_dict()
    if not isinstance(state, dict) or not all(isinstance(state.get(key), type(own[key])) for key in own):
        yield f"optimizer_states must have {', '.join(own)}"
    own["param_groups"][0]["lr"] = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](step)
    yield from _other_groups(state["param_groups"], own["param_groups"])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Parameters that no loss depends on have none, such as those of an encoder's unused layer
    if step and 2 * len(state["state"]) < len(parameters):
        yield f"optimizer_states have moments of {len(state['state'])} parameters, of {len(parameters)}"
    for index, entry in state["state"].items():
        if type(index) is not int or not 0 <= index < len(parameters):
            yield f"optimizer_states have moments of the parameter {index!r}, which there is not"
        yield from _other_moments(entry, parameters[index], step)


def _other_groups(groups: list[Any], own: list[dict[str, Any]]) -> Iterator[str]:
    """Which setting of an optimizer is another."""
    if len(groups) != len(own) or any(not isinstance(group, dict) for group in groups):
        yield f"optimizer_states must have groups of parameters, {len(own)}"
    for group, expected in zip(groups, own, strict=True):
        if group.keys() != expected.keys():
            yield "optimizer_states have other settings than this run"
        for key, value in expected.items():
            if key in HOW and (group[key] is None or isinstance(group[key], bool)):
                continue
            if group[key] != value and not (key == "lr" and math.isclose(group[key], value, rel_tol=1e-6)):
                yield f"optimizer_states have {key} {group[key]}, not {value}"


def _other_moments(entry: Any, parameter: Tensor, step: int) -> Iterator[str]:
    """What is not Adam's of a parameter after so many steps."""
    if not isinstance(entry, dict) or entry.keys() != MOMENTS:
        yield f"optimizer_states must have {', '.join(sorted(MOMENTS))} of each parameter"
    for key, value in entry.items():
        shape = parameter.shape if key != "step" else torch.Size()
        if not isinstance(value, Tensor) or value.shape != shape or value.layout != torch.strided:
            yield f"optimizer_states have a {key} of another shape than {list(shape)}"
        if key != "step" and value.dtype != parameter.dtype:
            yield f"optimizer_states have {key} in {value.dtype}, not {parameter.dtype}"
        if not value.isfinite().all() or (key != "exp_avg" and (value < 0).any()):
            yield f"optimizer_states have a {key} that is no such number"
    if not 1 <= entry["step"] <= step:
        yield f"optimizer_states are at step {entry['step']:g}, but global_step is {step}"


def _other_form(name: str, given: Any, own: Any) -> Iterator[str]:
    """Where a nested state has other keys or types than that of a new loop, or negative counts."""
    if isinstance(own, Mapping):
        if not isinstance(given, Mapping) or given.keys() < own.keys():
            yield f"{name} must have {', '.join(own) or 'a mapping'}"
        for key, value in own.items():
            yield from _other_form(f"{name}.{key}", given[key], value)
    elif type(given) is not type(own) or (isinstance(own, int) and given < 0):
        yield f"{name} is {given!r}, a {type(own).__name__} from 0 expected"


def _problems(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in PARTS.items():
        if not isinstance(checkpoint.get(name), kind):
            found = type(checkpoint[name]).__name__ if name in checkpoint else "missing"
            yield f"{name} must be {kind.__name__}, got {found}"
    loop = checkpoint["loops"].get("fit_loop")
    if not isinstance(loop, dict) or not loop:
        yield "loops have no fit_loop"
    for state in checkpoint["lr_schedulers"]:
        if not isinstance(state, dict) or not isinstance(state.get("last_epoch"), int):
            yield "lr_schedulers do not say which step they are at"
