"""Whether a checkpoint holds what resuming a run needs."""

from collections.abc import Mapping
from typing import Any

from lit_klrb.errors import ConfigurationError

# What a trainer reads of a checkpoint to go on with its run; one without trains the weights anew from step 0.
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
    """Refuse a checkpoint that lacks something, such as one of weights alone.

    Args:
        path: Where it is, for the error message.
        checkpoint: Its content.

    Raises:
        ConfigurationError: Naming what is missing or of another type.
    """
    for name, kind in PARTS.items():
        if not isinstance(checkpoint.get(name), kind):
            found = type(checkpoint[name]).__name__ if name in checkpoint else "missing"
            raise ConfigurationError(
                f"{path} cannot be resumed: its {name} is {found}, {kind.__name__} expected; "
                "policy_path starts another run from its policy",
                key="ckpt_path",
            )
