"""The model card of an exported policy: reference, estimator, beta, and the KL with its error."""

import re
from pathlib import Path
from typing import Any

import yaml

from lit_klrb import schema
from lit_klrb.errors import printable
from lit_klrb.files import read_object
from lit_klrb.run.same_run import RUN_KEY

# The first line after the metadata, which marks a README.md as an export's own.
MARK = "<!-- written by lit-klrb export -->"
# Characters of a value that are quoted.
MAX_CELL = 500
# Standard errors within which 95 % of a normal distribution lie.
NORMAL = 1.96


def model_card(
    checkpoint: dict[str, Any],
    run: Path,
    weights_sha256: str,
    licence: str | None = None,
    adapter: bool = False,
) -> str:
    """The card of a checkpoint's policy, as Markdown with the metadata that the hub reads.

    Names and paths come from the checkpoint, which others may have written: they are shown as text. The
    summary of the run directory is quoted if it is that of these weights. The base model is the initial
    policy, or else the reference of a reinforced one, if it is on the hub; a teacher is no base.
    """
    settings = _mapping(_mapping(checkpoint.get(RUN_KEY)).get("settings"))
    model, kl = _mapping(settings.get("model")), _mapping(settings.get("kl"))
    arguments = _mapping(model.get("init_args"))
    data = _mapping(_mapping(settings.get("data")).get("init_args"))
    module = str(model.get("class_path") or "").rpartition(".")[2]
    if not module.isidentifier():
        module = ""
    estimator = _mapping(kl.get("estimator")).get("class_path", kl.get("estimator"))
    facts = {
        "trained by": f"{module} of lit_klrb" if module else None,
        "initial policy": arguments.get("policy_path"),
        "reference": arguments.get("reference_path"),
        "the reference's system prompt": data.get("teacher_system_prompt"),
        "the reference's examples": data.get("teacher_examples") or None,
        "KL estimator": str(estimator).rpartition(".")[2] if estimator else None,
        "beta": kl.get("beta", arguments.get("beta")),
        "reward": arguments.get("reward_path"),
        "data": data.get("source"),
        "steps": checkpoint.get("global_step"),
    }
    facts |= _evaluation(run, weights_sha256)
    starts = ("policy_path",) if module == "DistillModule" else ("policy_path", "reference_path")
    bases = [path for key in starts if _is_hub_id(path := arguments.get(key)) and path != "policy"]
    metadata: dict[str, Any] = {"library_name": "peft"} if adapter else {}
    metadata |= {"license": licence} if licence else {}
    metadata |= {"base_model": bases[0]} if bases else {}
    return _card(metadata, f"{MARK}\n\n# {module or 'Policy'}", facts)


def imported_card(facts: dict[str, Any], licence: Any) -> str:
    """The card of a model that was converted from a GGUF file."""
    text = (
        "# Model from a GGUF file\n\nThese weights are those of the file, as floating-point numbers. If the "
        "file is quantised, this is\nnot the original model: do not compare its scores with published ones."
    )
    return _card({"license": licence} if is_licence(licence) else {}, text, facts)


def is_licence(name: Any) -> bool:
    """Whether a name has the form of the hub's licences, such as apache-2.0, and is text in YAML."""
    named = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9.-]{0,40}", name) is not None
    return named and yaml.safe_load(name) == name


def _card(metadata: dict[str, Any], text: str, facts: dict[str, Any]) -> str:
    lines = {"library_name": "transformers", "pipeline_tag": "text-generation"} | metadata
    head = "".join(f"{name}: {value}\n" for name, value in lines.items())
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items() if value is not None)
    return f"---\n{head}---\n{text}\n\n| | |\n|---|---|\n{rows}\n"


def initial_policy(checkpoint: dict[str, Any]) -> str | None:
    """The model from which the training started, as its run named it."""
    arguments = _mapping(checkpoint.get("hyper_parameters"))
    path = arguments.get("policy_path") or arguments.get("reference_path")
    return path if isinstance(path, str) else None


def is_own_card(path: Path) -> bool:
    """Whether a README.md was written by an export."""
    return path.is_file() and MARK.encode() in path.read_bytes()


def _evaluation(run: Path, weights_sha256: str) -> dict[str, str]:
    """Reward and KL of the run's final evaluation, with 95 % intervals and the number of prompts."""
    summary = read_object(run / schema.SUMMARY)
    final = _mapping(summary.get("final")) if summary.get(schema.WEIGHTS) == weights_sha256 else {}
    prompts = {} if (count := summary.get(schema.PROMPTS)) is None else {"evaluation prompts": str(count)}
    names = {"reward": schema.REWARD, "KL(policy‖reference), nats per sequence": schema.KL}
    numbers = {
        f"{label} (95 % interval)": _with_interval(value, NORMAL * error)
        for label, key in names.items()
        if isinstance(value := final.get(key), float) and isinstance(error := final.get(f"{key}_se"), float)
    }
    return numbers | (prompts if numbers else {})


def _with_interval(value: float, half: float) -> str:
    return f"{value:.4g} ({value - half:.4g} to {value + half:.4g})"


def _cell(value: Any) -> str:
    """Format a value as one line of text, without markup and control characters."""
    line = printable(" ".join(str(value).split()))
    shown = line if len(line) <= MAX_CELL else f"{line[:MAX_CELL]} ..."
    return re.sub(r"[\\`|<\[&]", r"\\\g<0>", shown)


def _is_hub_id(path: Any) -> bool:
    """Whether a path names a repository of the hub; YAML must not take it for a number or a truth value."""
    named = isinstance(path, str) and re.fullmatch(r"[\w-]+[\w.-]*(/[\w-]+[\w.-]*)?", path) is not None
    return named and not Path(path).exists() and yaml.safe_load(path) == path


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
