"""Checks of the checkpoints that a module starts from, and hints how to make missing ones."""

import re
import shlex
from pathlib import Path
from typing import Any

from lit_klrb import schema
from lit_klrb.engine.served import is_address
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import local_path
from lit_klrb.models.loading import is_file, looks_local

# Arguments of modules that name models and tokenizers; ckpt_path replaces these, as it contains them.
INITIAL = ("policy_path", "classifier_path", "backbone_path", "tokenizer_path")
# All that name models and tokenizers.
PATHS = (*INITIAL, "reference_path", "reward_path")

# The model of configs/chat
CHAT = Path("runs/models/smollm2")
# Where configurations are, those of published results last.
FOLDERS = ("configs", "replication/configs")


def check_upstream(settings: dict[str, Any]) -> None:
    """Check that the files and folders a module starts from exist."""
    for key, path in named_paths(settings):
        if (not is_file(path) and (":" in path or not looks_local(path))) or local_path(path, key).exists():
            continue
        maker = _maker(Path(path))
        hint = f"make it with: lit-klrb fit --config {maker}" if maker else "name one that does"
        if Path(path) == CHAT:
            hint = "make it with: make chat"
        elif not is_file(path):
            into, call = f"--output_dir {shlex.quote(path)}", "lit-klrb"
            hint = f"make it with: {call} export --ckpt_path FILE {into} or, from a GGUF file, "
            hint += f"{call} import-gguf FILE {into}"
        raise ConfigurationError(f"{path} does not exist; {hint}", key=key)


def named_paths(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """The keys that name models and tokenizers, with each path; teachers that are served are left out."""
    paths = [(key, path) for key in PATHS for path in paths_of(settings.get(key))]
    paths += [(f"teachers.{name}", path) for name, path in (settings.get("teachers") or {}).items()]
    return [(key, path) for key, path in paths if not is_address(path)]


def paths_of(value: str | dict[str, float] | None) -> list[str]:
    """The paths in a setting, which is a path, None, or a mapping from paths to weights."""
    return [] if value is None else [value] if isinstance(value, str) else [str(path) for path in value]


def _maker(checkpoint: Path) -> Path | None:
    """The configuration below the working directory whose run writes a checkpoint; None if there is none."""
    for config in (path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.yaml"))):
        match = re.search(r"^\s*default_root_dir:\s*(\S+)", config.read_text("utf-8"), re.MULTILINE)
        if match and Path(match[1]) / schema.CHECKPOINT == checkpoint:
            return config
    return None
