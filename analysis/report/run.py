"""The page of a single run: reward, J, KL and length over its steps, and completions before and after."""

import shlex
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from analysis.report.elements import Figure, Section, Table, page
from analysis.report.figures import INK, sheet, thinned
from analysis.results.curves import curves, last_completions
from analysis.results.layout import REPORT
from analysis.stats.intervals import Interval
from analysis.stats.text import count, ends_text, number, whole_percent
from lit_klrb import schema
from lit_klrb.config_files import check_config_file
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import check_target, write_output

# Evaluated metrics of the figure, with the labels of their axes.
OBJECTIVE = "J"
SHOWN = {
    schema.REWARD: "reward",
    OBJECTIVE: "J = reward − β·KL",
    schema.KL: "KL, nats per completion",
    schema.LENGTH: "length, tokens",
}
# Metrics of the figure of training, with the titles of all panels.
TRAINED = {**SHOWN, "grad_norm": "norm of the gradient"}
# Most steps in its panels.
STEPS = 200
# Keys of the data whose values the page shows: what only one of the models reads.
CONTEXT = ("system_prompt", "teacher_system_prompt", "teacher_examples")
# Settings of the run that the page shows: a name, and the keys of its configuration.
SETTINGS = {
    "module": "model.class_path",
    "policy": "model.init_args.policy_path",
    "reference": "model.init_args.reference_path",
    "KL estimator": "kl.estimator.class_path",
    "β": "kl.beta",
    "learning rate": "model.init_args.learning_rate",
    "steps": "trainer.max_steps",
}
REWARD_PATH = "model.init_args.reward_path"
# Half the width of a 95 % interval, in standard errors.
Z = 1.96
CAPTION = (
    "Each point is an evaluation on the same held-out prompts; the bars are 95 % intervals over prompts, "
    "1.96 standard errors."
)

# A metric by step; None where it was not finite.
Curve = dict[int, float | None]


def build_run(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run; return its path.

    Raises:
        ConfigurationError: If the run has not been evaluated, or the page cannot be written.
    """
    output = run / REPORT if output is None else output
    check_target(output)
    metrics: dict[str, Curve] = {
        name: dict(zip(curve["step"], curve["value"], strict=True))
        for name, curve in curves(run / schema.METRICS_DIR).items()
    }
    configuration = _configuration(run)
    if not _setting(configuration, REWARD_PATH) and not any(metrics.get(f"val/{schema.REWARD}", {}).values()):
        # A run without a reward logs zeros
        metrics = {name: own for name, own in metrics.items() if not name.endswith(f"/{schema.REWARD}")}
    kl_settings = configuration.get("kl")
    beta = kl_settings.get("beta") if isinstance(kl_settings, dict) else None
    kl, reward = (_finite(metrics, f"val/{key}") for key in (schema.KL, schema.REWARD))
    if isinstance(beta, int | float) and (steps := [step for step in reward if step in kl]):
        metrics[f"val/{OBJECTIVE}"] = {step: reward[step] - beta * kl[step] for step in steps}
    sections: dict[str, list[Section | None]] = {
        "Answer": [_curves(run, metrics)],
        "Runs": [_training(metrics), _completions(run), _logged(metrics)],
        "Settings": [_settings(run)],
    }
    shown = {part: [section for section in own if section is not None] for part, own in sections.items()}
    parts = {part: own for part, own in shown.items() if own}
    # What the run did to its reward, or to the KL where there is none
    kicker = f"Run {run.name}"
    title, lead = kicker, _counts(metrics)
    for name, key, own in (("KL", schema.KL, kl), ("Reward", schema.REWARD, reward)):
        if len(own) > 1:
            before, *_, after = own.values()
            title = f"{name} {number(before)} before, {number(after)} after"
            lead = [*_intervals(own, _finite(metrics, f"val/{key}_se")), *_counts(metrics)]
    write_output(output, page(title, [kicker], parts, lead=" ".join(lead)))
    return output


def _intervals(values: Mapping[int, float], errors: Mapping[int, float]) -> list[str]:
    """The intervals of the first and the last value, in a sentence; empty where an error is unknown."""
    steps = min(values), max(values)
    if any(step not in errors for step in steps):
        return []
    ends = [Interval(values[at] - Z * errors[at], values[at] + Z * errors[at], 0.95) for at in steps]
    return [f"95\u00a0% intervals over prompts: {ends_text(ends[0])} before, {ends_text(ends[1])} after."]


def _finite(metrics: Mapping[str, Curve], name: str) -> dict[int, float]:
    """A metric where it is finite; empty without it."""
    return {step: value for step, value in metrics.get(name, {}).items() if value is not None}


def _counts(metrics: Mapping[str, Curve]) -> list[str]:
    """What carries no signal, where the run records it: shares over the training, and rows left out."""
    texts = {
        "train/equal_rewards": "of the prompts had completions of equal reward, which train nothing",
        "train/unfinished": "of the completions were cut at their largest length",
    }
    shares = {text: [*_finite(metrics, key).values()] for key, text in texts.items()}
    lines = [f"{whole_percent(sum(own) / len(own))} {text}." for text, own in shares.items() if any(own)]
    left_out = [value for value in _finite(metrics, "train/left_out").values() if value]
    return lines + [f"{count(int(value), 'row')} of the data left out." for value in left_out[-1:]]


def _logged(metrics: Mapping[str, Curve]) -> Section | None:
    """The numbers that rewards logged; None without any."""
    prefix, rows = f"train/{schema.LOGGED}", []
    for name in sorted(name for name in metrics if name.startswith(prefix)):
        if values := [*_finite(metrics, name).values()]:
            rows.append((name.removeprefix(prefix), values[0], values[-1], sum(values) / len(values)))
    if not rows:
        return None
    caption = "Means over the completions of a rollout, in training."
    table = Table(caption, ("name", "first step", "last step", "mean over steps"), rows)
    return Section("logged", "What the reward logged", tables=[table])


def _curves(run: Path, metrics: Mapping[str, Curve]) -> Section:
    measured = {name: metrics[f"val/{name}"] for name in SHOWN if f"val/{name}" in metrics}
    if not measured:
        raise ConfigurationError(f"{run} has no evaluation of completions yet; run fit first")
    steps = list(next(iter(measured.values())))
    # Half the widths of intervals
    widths = {
        name: {step: error and Z * error for step, error in metrics.get(f"val/{name}_se", {}).items()}
        for name in measured
    }
    columns: list[tuple[str, Mapping[int, float | None]]] = []
    for name, curve in measured.items():
        columns += [(SHOWN[name], curve), *([("± 95 %", widths[name])] if widths[name] else [])]
    header = ("step", *(name for name, _ in columns))
    rows = [(str(step), *(values.get(step) for _, values in columns)) for step in steps]
    labels = [SHOWN[name] for name in measured]
    caption = CAPTION + " That of J is not recorded." * (OBJECTIVE in measured)
    alt = f"{' and '.join(labels)} at {len(steps)} evaluations, from step {steps[0]} to {steps[-1]}."
    return Section(
        "curves",
        "Reward, KL and length" if schema.REWARD in measured else "KL and length",
        figures=[Figure(lambda: _draw(measured, widths), alt, caption, Table("Evaluations.", header, rows))],
    )


def _training(metrics: Mapping[str, Curve]) -> Section | None:
    """What each step was trained on, as far as the run logs it; None for fewer than three steps."""
    logged = {name: _finite(metrics, f"train/{name}") for name in TRAINED}
    drawn = {name: dict(thinned([*own.items()], STEPS)) for name, own in logged.items() if len(own) > 2}
    if not drawn:
        return None
    most = max(len(logged[name]) for name in drawn)
    kept = f" Of {most:,} steps one in {-(-most // STEPS)} is drawn." if most > STEPS else ""
    steps = sorted({step for curve in drawn.values() for step in curve})
    header = ("step", *(TRAINED[name] for name in drawn))
    rows = [(str(step), *(curve.get(step) for curve in drawn.values())) for step in steps]
    caption = f"Each point is of the completions that a step trains on, sampled before its update.{kept}"
    alt = f"{', '.join(TRAINED[name] for name in drawn)} at {len(steps)} steps of training."
    figure = Figure(lambda: _draw(drawn, {}), alt, caption, Table("Steps of training.", header, rows))
    return Section("training", "Training, step by step", figures=[figure])


def _draw(measured: Mapping[str, Curve], widths: Mapping[str, Mapping[int, float | None]]) -> str:
    """A panel for each metric: evaluations with intervals as points, steps without `widths` as a line."""
    across = min(2, len(measured))
    down = -(-len(measured) // across)
    marks = {"marker": "o", "markersize": 4, "capsize": 3} if widths else {"linewidth": 1}
    with sheet(0.3 + 2 * down) as drawn:
        panels = drawn.canvas.subplots(down, across, squeeze=False).flatten()
        for axes in panels[len(measured) :]:
            axes.set_axis_off()
        for axes, (name, curve) in zip(panels, measured.items(), strict=False):
            values = np.array([*curve.values()], dtype=float)
            bars = [widths[name].get(at) or 0 for at in curve] if widths else None
            axes.errorbar([*curve], values, bars, color=INK, **marks)
            if name not in (schema.REWARD, OBJECTIVE) and not (values < 0).any():
                axes.set_ylim(bottom=0)
            axes.set_xlabel("step")
            axes.locator_params("x", integer=True)
            axes.set_title(TRAINED[name], loc="left")
    return drawn.svg


def _completions(run: Path) -> Section | None:
    """Completions of the first and the last evaluation; None if `CompletionTable` did not run."""
    rows = [_parts(row["text_at_start"], row["text"]) for row in last_completions(run)]
    if not rows:
        return None
    prompts = _differing([prompt for prompt, _, _ in rows])
    rows = [(prompt, *texts[1:]) for prompt, texts in zip(prompts, rows, strict=True)]
    return Section(
        "completions",
        "Completions before and after",
        paragraphs=[
            "One completion of each of the first prompts of the evaluation, unselected. The first column is "
            "what both texts begin with: the prompt, sometimes with a few words more. Lines with which all "
            "prompts begin or end are left out."
        ],
        tables=[Table("Sampled with the same random numbers.", ("prompt", "before", "after"), rows)],
    )


def _differing(prompts: list[str]) -> list[str]:
    r"""Prompts without the lines that all of them begin and end with, such as those of a chat template.

    Example:
        >>> _differing(["user\nWhy?\nassistant", "user\nWho?\nassistant"])
        ['Why?', 'Who?']
    """
    lines = [prompt.split("\n") for prompt in prompts]
    if len(set(prompts)) < 2:
        return prompts
    for _ in range(2):  # from the beginning, then from the end
        shared = sum(1 for _ in takewhile(lambda line: len(set(line)) == 1, zip(*lines, strict=False)))
        lines = [part[shared:][::-1] for part in lines]
    return ["\n".join(part) for part in lines]


def _settings(run: Path) -> Section | None:
    """What the models read beside the prompts, and the command; None if the run has no configuration."""
    path, configuration = run / schema.CONFIG, _configuration(run)
    if not configuration:
        return None
    try:
        data = configuration["data"]["init_args"]
    except (LookupError, TypeError):
        raise ConfigurationError(f"{path} is not the configuration of a run: it has no data") from None
    rows = [[name, text] for name, key in SETTINGS.items() if (text := _setting(configuration, key))]
    rows += [[key.replace("_", " "), _lines(data[key])] for key in CONTEXT if data.get(key)]
    command = shlex.join(["lit-klrb", "fit", "--config", str(path)])
    return Section(
        "settings",
        "What made this run",
        tables=[Table("From its configuration.", ("", ""), [*rows, ["command", command]])],
    )


def _setting(configuration: Any, key: str) -> str:
    """A text or number under a dotted key, of a class its name; "" if there is none."""
    for part in key.split("."):
        configuration = configuration.get(part) if isinstance(configuration, dict) else None
    text = str(configuration) if isinstance(configuration, str | int | float) else ""
    return text.rpartition(".")[2] if key.endswith("class_path") else text


def _configuration(run: Path) -> dict[str, Any]:
    """The configuration of the run as it stands there, as it may be a stranger's; empty if it has none."""
    path = run / schema.CONFIG
    if not path.is_file():
        return {}
    check_config_file(path)
    content = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: a mapping is expected")
    return content


def _lines(value: Any) -> str:
    """A text, or questions with their answers, each on a line."""
    return value if isinstance(value, str) else "\n".join(" ".join(map(str, pair)) for pair in value)


def _parts(before: str, after: str) -> tuple[str, str, str]:
    r"""What two texts begin with, up to a line or a word, and the rest of each.

    Example:
        >>> _parts("Why?\nThe sea.", "Why?\nThe sky.")
        ('Why?', 'The sea.', 'The sky.')
    """
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    common = "".join(letter for letter, _ in same)
    length = 1 + max(common.rfind("\n"), -1 if "\n" in common else common.rfind(" "))
    return common[:length].strip(), before[length:].strip(), after[length:].strip()
