"""Checks that a checkpoint has everything needed to resume a run."""

from collections.abc import Iterator, Mapping
from typing import Any

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


def check_resumable(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint is complete; one with weights only is not."""
    _refuse(path, _problems(checkpoint))


def _refuse(path: str, problems: Iterator[str]) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise ConfigurationError(
            f"{path} cannot be resumed: its {problem}; policy_path starts another run from its policy",
            key="ckpt_path",
        )


def _problems(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    for name, expected in PARTS.items():
        if not isinstance(checkpoint.get(name), expected):
            actual = type(checkpoint[name]).__name__ if name in checkpoint else "missing"
            yield f"{name} must be {expected.__name__}, got {actual}"
    loop = checkpoint["loops"].get("fit_loop")
    if not isinstance(loop, dict) or not loop:
        yield "loops have no fit_loop"
    for state in checkpoint["lr_schedulers"]:
        if not isinstance(state, dict) or not isinstance(state.get("last_epoch"), int):
            yield "lr_schedulers do not say which step they are at"
