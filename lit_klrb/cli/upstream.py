"""Checks of the checkpoints that a module starts from, and hints how to make missing ones."""

import re
import shlex
from pathlib import Path
from typing import Any

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import local_path
from lit_klrb.models.loading import is_file, looks_local

# Arguments of modules that name models and tokenizers; ckpt_path replaces these, as it contains them.
INITIAL = ("policy_path", "classifier_path", "backbone_path", "tokenizer_path")
# All that name models and tokenizers.
PATHS = (*INITIAL, "reference_path", "reward_path")

# The model of configs/chat
CHAT = Path("runs/models/smollm2")
# Where configurations are.
FOLDERS = ("configs", "replication/configs")


def check_upstream(settings: dict[str, Any]) -> None:
    """Check that the files and folders a module starts from exist."""
    paths = [(key, path) for key in PATHS for path in paths_of(settings.get(key))]
    for key, path in paths:
        if (not is_file(path) and (":" in path or not looks_local(path))) or local_path(path, key).exists():
            continue
        maker = next((config for config in configurations() if made_by(config) == Path(path)), None)
        hint = f"make it with: python -m lit_klrb fit --config {maker}" if maker else "name one that does"
        if Path(path) == CHAT:
            hint = "make it with: make chat"
        elif not is_file(path):
            into, call = f"--output_dir {shlex.quote(path)}", "python -m lit_klrb"
            hint = f"make it with: {call} export --ckpt_path FILE {into} or, from a GGUF file, "
            hint += f"{call} import-gguf FILE {into}"
        raise ConfigurationError(f"{path} does not exist; {hint}", key=key)


def next_command(checkpoint: Path, is_reward: bool = False) -> str:
    """What can follow a run: a stage that starts from its checkpoint, or its export."""
    # Backwards, as a warm start (dpo.yaml) is more usual than distillation (distill.yaml)
    runs = [config for config in reversed(configurations()) if is_run(config)]
    own = {config.parent for config in runs if made_by(config) == checkpoint}
    for config in sorted(runs, key=lambda config: config.parent not in own):
        named = re.findall(r"^\s*\w+_path:\s*(\S+\.ckpt)\s*$", config.read_text("utf-8"), re.MULTILINE)
        made = made_by(config)
        ready = all(Path(path).exists() for path in named) and made is not None and not made.exists()
        if str(checkpoint) in named and ready:
            return f"next: python -m lit_klrb fit --config {config}"
    if is_reward:
        return f"to train with this reward: --model.reward_path {shlex.quote(str(checkpoint))}"
    folder = checkpoint.parent.parent / "model"
    paths = f"--ckpt_path {shlex.quote(str(checkpoint))} --output_dir {shlex.quote(str(folder))}"
    return f"to use it elsewhere: python -m lit_klrb export {paths}"


def paths_of(value: str | dict[str, float] | None) -> list[str]:
    """The paths in a setting, which is a path, None, or a mapping from paths to weights."""
    return [] if value is None else [value] if isinstance(value, str) else [str(path) for path in value]


def configurations() -> list[Path]:
    """The configurations below the working directory, those of published results last."""
    return [path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.yaml"))]


def is_run(config: Path) -> bool:
    """Whether `fit` reads a configuration, rather than `study` or a sweep."""
    return re.search(r"^model:", config.read_text("utf-8"), re.MULTILINE) is not None


def made_by(config: Path) -> Path | None:
    """The checkpoint that the run of a configuration file writes."""
    found = re.search(r"^\s*default_root_dir:\s*(\S+)", config.read_text("utf-8"), re.MULTILINE)
    return Path(found[1]) / schema.CHECKPOINT if found else None
