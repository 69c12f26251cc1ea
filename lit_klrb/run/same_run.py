"""Checks that resuming continues the same run: which settings may differ, and which must not."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_klrb.errors import ConfigurationError, concerning
from lit_klrb.files import sha256
from lit_klrb.redaction import redacted as redacted_settings
from lit_klrb.run.checkpoints import check_resumable, read

CALLBACKS = "trainer.callbacks"
# Keys that may differ, with all keys below them, and why. All other keys must agree.
MAY_DIFFER = {
    "ckpt_path": "names the run to resume",
    "weights_only": "how the checkpoint is read",
    "checkpoint": "when and where checkpoints are written; training does not depend on it",
    "trainer.default_root_dir": "the run's own directory, which may have been moved, or a new one",
    "trainer.logger": "in addition to the run's metrics.csv",
    "trainer.log_every_n_steps": "how much of the training is logged",
    "trainer.enable_autolog_hparams": "what is logged",
    "trainer.enable_progress_bar": "what is shown",
    "trainer.enable_model_summary": "what is shown",
    "trainer.profiler": "what is measured",
    "trainer.max_time": "when to stop; the run can be resumed",
    "trainer.accelerator": "the same random numbers; sums are rounded differently",
    "trainer.devices": "if the number of processes stays the same",
    "trainer.num_nodes": "if the number of processes stays the same",
    "trainer.strategy": "if the number of processes stays the same",
    "model.init_args.served_timeout": "how long is waited for a served teacher",
    "model.init_args.reward_retries": "how often a reward that gets no answer is called again",
    CALLBACKS: "those of lit_klrb.callbacks, which only observe; all others must agree",
    "trainer.max_steps": "may increase if nothing depends on it",
}
OBSERVERS = "lit_klrb.callbacks."
STUDIES = "lit_klrb.studies."

# The key of checkpoints with the id and the settings of their run.
RUN_KEY = "run"
# Keys of files and folders that a resumed run reads again: their content must agree, not their path.
READ_AGAIN = ("reference_path", "teachers", "reward_path", "source", "preferences")

Settings = dict[str, Any]


def record(settings: Settings, as_written: Settings | None = None) -> Settings:
    """The part of a configuration that `check_same_run` compares, as plain dictionaries, for a checkpoint.

    Args:
        settings: The configuration.
        as_written: The same as it is written, if it has values that are not: of these, but no passwords, a
            hash is compared.
    """
    again = {key: _content_of(value) for key, value in leaves(settings) if key.endswith(READ_AGAIN)}
    texts = dict(leaves(as_written or settings))
    redacted = {
        key: _digest(redacted_settings(value, {}, key))
        for key, value in leaves(settings)
        if texts[key] != value and (key == CALLBACKS or not _may_differ(key))
    }
    contents = {key: digest for key, digest in again.items() if digest}
    return {"settings": as_written or settings, "contents": contents, "redacted": redacted}


def run_of(path: str) -> Settings:
    """The id and the `record` of the run of a checkpoint.

    A checkpoint without them, saved by a user's own trainer, has at least the arguments of its module.
    """
    with concerning(path, key="ckpt_path"):
        checkpoint = read(Path(path), mmap=True)
    check_resumable(path, checkpoint)
    if RUN_KEY in checkpoint:
        run: Settings = checkpoint[RUN_KEY]
        kinds = {"id": str, "settings": dict, "contents": dict}
        if not isinstance(run, dict) or any(not isinstance(run.get(key), kinds[key]) for key in kinds):
            raise ConfigurationError(f"{path}: its {RUN_KEY} is not what fit writes", key="ckpt_path")
        return run
    arguments = dict(checkpoint.get("hyper_parameters", {}))
    model = {"class_path": arguments.pop("_class_path", None), "init_args": arguments}
    return {"id": "", "settings": {"model": model}, "contents": {}}


def check_same_run(path: str, saved: Settings, wanted: Settings) -> None:
    """Check that a run is resumed with the settings it was started with."""
    old, new = dict(leaves(saved["settings"])), dict(leaves(wanted["settings"]))
    alternative = (
        "--ckpt_path resumes the same run only; to start another from its policy use "
        f"--model.init_args.policy_path {path}"
    )
    # A key that only one of them has belongs to another version, or to a class that differs.
    for key in (key for key in old if key in new):
        contents = saved["contents"].get(key), wanted["contents"].get(key)
        problem = None
        if None not in contents:
            if contents[0] != contents[1]:
                problem = f"{new[key]} has changed since the run of {path} was started"
        elif _differ(key, saved, wanted, old, new) and (why := _objection(key, old, new)) is not None:
            other = f"not {new[key]}" if old[key] != new[key] else "of another value"
            problem = f"{path} was trained with {old[key]}, {other}{why}"
        if problem is not None:
            raise ConfigurationError(f"{problem}; {alternative}", key=key)


def leaves(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted key; a dictionary as the value of an argument is one setting.

    Example:
        >>> model = {"class_path": "SFTModule", "init_args": {"policy_config": {"n_layer": 2}}}
        >>> list(leaves({"model": model}))
        [('model.class_path', 'SFTModule'), ('model.init_args.policy_config', {'n_layer': 2})]
    """
    for section, content in settings.items():
        for key, value in content.items() if isinstance(content, dict) else ():
            if key == "init_args":
                yield from ((f"{section}.{key}.{name}", argument) for name, argument in value.items())
            elif isinstance(value, dict) and "class_path" in value:
                yield from leaves({f"{section}.{key}": value})
            else:
                yield f"{section}.{key}", value
        if not isinstance(content, dict):
            yield section, content


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _differ(key: str, saved: Settings, wanted: Settings, old: Settings, new: Settings) -> bool:
    """Whether two runs have other values of a setting; of one that is not written, hashes are compared."""
    marks = [run.get("redacted", {}).get(key) for run in (saved, wanted)]
    if not any(marks):
        return bool(old[key] != new[key])
    first, second = (mark or _digest(leaf[key]) for mark, leaf in zip(marks, (old, new), strict=True))
    return first != second


def _content_of(value: Any) -> Any:
    """The content of a file or folder; of weighted rewards or named teachers, of each."""
    if isinstance(value, dict):
        return {_content_of(name) or name: _content_of(other) or other for name, other in value.items()}
    return _content(Path(value)) if isinstance(value, str) and Path(value).exists() else None


def _content(path: Path) -> str:
    """SHA-256 of a file, or of the names and files of a folder."""
    if path.is_file():
        return sha256(path)
    result = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        result.update(f"{file.relative_to(path)}\0{_content(file)}\0".encode())
    return result.hexdigest()


def _objection(key: str, old: Settings, new: Settings) -> str | None:
    """Why a key must not differ, as the end of a sentence; None if it may differ."""
    if key == "trainer.max_steps":
        return _objection_to_steps(old, new)
    if key == CALLBACKS:
        acting = [
            [c for c in _listed(run[key]) if not c["class_path"].startswith(OBSERVERS)] for run in (old, new)
        ]
        return "" if acting[0] != acting[1] else None
    # A served teacher may have moved
    if key.endswith("reference_path") and all("://" in str(settings[key]) for settings in (old, new)):
        return None
    return None if _may_differ(key) else ""


def _may_differ(key: str) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in MAY_DIFFER)


def _listed(callbacks: list[Settings] | Settings | None) -> list[Settings]:
    """The callbacks, of which one need not be in a list."""
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []


def _objection_to_steps(old: Settings, new: Settings) -> str | None:
    before, after = (settings["trainer.max_steps"] for settings in (old, new))
    if not isinstance(before, int) or not isinstance(after, int) or after < before:
        return " (it can only increase)"
    if old.get("model.init_args.schedule", "constant") != "constant":
        return " (the learning rate's schedule depends on it)"
    for schedule in ("kl.final_beta", "kl.final_discount", "kl.final_forward_share"):
        if old.get(schedule) is not None:
            return f" ({schedule} depends on it)"
    if any(c["class_path"].startswith(STUDIES) for c in _listed(old.get(CALLBACKS))):
        return " (the snapshots of a study depend on it)"
    return None
