"""A check that a checkpoint has everything needed to resume a run."""

from collections.abc import Mapping
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
    """Check that a checkpoint is complete; one with weights only is not.

    Args:
        path: The path of the checkpoint, for the error message.
        checkpoint: The content of the checkpoint.

    Raises:
        ConfigurationError: If an entry is missing or has another type; names it.
    """
    for name, kind in PARTS.items():
        if not isinstance(checkpoint.get(name), kind):
            found = type(checkpoint[name]).__name__ if name in checkpoint else "missing"
            raise ConfigurationError(
                f"{path} cannot be resumed: its {name} must be {kind.__name__}, got {found}; "
                "policy_path starts another run from its policy",
                key="ckpt_path",
            )
