"""What a module starts from: the checkpoints that must be there, and which configuration makes them."""

import re
from pathlib import Path
from typing import Any

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

# Where a module says what it starts from.
PATHS = ("policy_path", "reference_path", "classifier_path", "tokenizer_path", "reward_path")
# Of these, what a checkpoint given by ckpt_path has in itself.
INITIAL = ("policy_path", "classifier_path", "tokenizer_path")


def check_upstream(settings: dict[str, Any]) -> None:
    """See that the checkpoints a module starts from are there.

    Raises:
        ConfigurationError: Naming the key, the path, and the command that makes it if a config beside the
            default ones does.
    """
    paths = [(key, path) for key in PATHS for path in paths_of(settings.get(key))]
    for key, path in paths:
        if not path.endswith(".ckpt") or Path(path).exists():
            continue
        maker = config_that_makes(Path(path))
        how = f"make it with: python -m lit_klrb fit --config {maker}" if maker else "name one that does"
        raise ConfigurationError(f"{path} does not exist; {how}", key=key)


def paths_of(value: str | dict[str, float] | None) -> list[str]:
    """The paths a setting names: one, none, or several with their weights."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def config_that_makes(checkpoint: Path) -> Path | None:
    """The file under configs/ whose run directory the checkpoint lies in."""
    pattern = re.compile(r"^\s*default_root_dir:\s*(\S+)", re.MULTILINE)
    for config in sorted(Path("configs").rglob("*.yaml")):
        found = pattern.search(config.read_text("utf-8"))
        if found and Path(found[1]) / schema.CHECKPOINT == checkpoint:
            return config
    return None
