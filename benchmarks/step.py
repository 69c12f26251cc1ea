"""Training steps, compared with TRL's."""

import functools
import itertools
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from . import floor, step_case as case
from .measure import in_own_process, machine, matrix_product_rate, peak_megabytes
from .table import markdown, number, spread

PACKAGES = ["torch", "transformers", "trl", "lightning"]
HEADING = """### {title}

`python -m benchmarks {key}` on {machine}.

"""


class Variant(NamedTuple):
    """A trainer on a task; `function` returns the time of a cycle and the shares of its stages."""

    label: str
    function: str
    options: dict[str, object]

    def run(self, task: case.Task, cycles: int) -> tuple[float, dict[str, float]]:
        """Train for a number of cycles."""
        from . import step_runs  # TRL takes seconds to import, and may not be installed

        found: tuple[float, dict[str, float]] = getattr(step_runs, self.function)(
            task, cycles=cycles, **self.options
        )
        return found


def _rloo(name: str, function: str, inner_epochs: int, **options: object) -> Variant:
    label = f"RLOO, {inner_epochs} inner step{'s' * (inner_epochs > 1)}: {name}"
    return Variant(label, function, {"inner_epochs": inner_epochs, **options})


class Comparison(NamedTuple):
    """Variants that take turns, each training some cycles, of which the last is counted.

    The time of each is divided by that of the later ones; bar and goal are for every such ratio.
    """

    title: str
    variants: list[Variant]
    bar: str
    goal: str
    cycles: int
    task: Callable[[Path], case.Task] = case.tiny
    rounds: int = 8


def _against_trl(inner_epochs: int, cycles: int) -> Comparison:
    steps = "one inner step" if inner_epochs == 1 else f"{inner_epochs} inner steps"
    variants = _ours_and_trl(inner_epochs, "RaoBlackwell")
    return Comparison(f"RLOO with {steps}, and TRL", variants, "0.45", "0.40", cycles)


def _ours_and_trl(inner_epochs: int, estimator: str) -> list[Variant]:
    return [
        _rloo(f"**ours, `{estimator}`**", "our_rloo", inner_epochs, estimator=estimator),
        _rloo("TRL `RLOOTrainer`", "trl_rloo", inner_epochs),
    ]


def _on_smollm2(precision: str, inner_epochs: int, lora: bool = False) -> Comparison:
    variants = _ours_and_trl(inner_epochs, "RaoBlackwellControlVariate")
    trained = "LoRA" if lora else "all weights"
    title = (
        f"SmolLM2-135M, {trained}, {precision}, {inner_epochs} inner step{'s' * (inner_epochs > 1)}, and TRL"
    )
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"} if lora else None
    task = functools.partial(_smollm2, precision, settings)
    return Comparison(title, variants, "0.8", "0.6", 3, task, rounds=5)


def _other(work: str, model: str, size: int, task: Callable[[Path], case.Task], rounds: int) -> Comparison:
    *goals, variants = OTHERS[work]
    return Comparison(f"{work}, {model}, and TRL", variants, "0.8", goals[size], 3, task, rounds)


def _smollm2(precision: str, lora: dict[str, object] | None, folder: Path) -> case.Task:
    return case.smollm2(precision, lora)


# Goals with the tiny model and with SmolLM2, and variants
OTHERS: dict[str, tuple[str, str, list[Variant]]] = {
    "dpo": (
        "0.30",
        "0.50",
        [
            Variant("DPO: **ours**", "our_dpo", {}),
            Variant("DPO: TRL `DPOTrainer`, reference taken before", "trl_dpo", {"precompute": True}),
            Variant("DPO: TRL `DPOTrainer`", "trl_dpo", {"precompute": False}),
        ],
    ),
    "sft": (
        "0.40",
        "0.60",
        [
            Variant("SFT: **ours**", "our_sft", {}),
            Variant("SFT: TRL `SFTTrainer`", "trl_sft", {}),
        ],
    ),
    "distill": (
        "0.40",
        "0.35",
        [
            Variant("distillation: **ours**", "our_distill", {}),
            Variant("distillation: TRL `DistillationTrainer`", "trl_distill", {}),
        ],
    ),
}
ESTIMATORS = ["RaoBlackwellControlVariate", "TiltedRaoBlackwell", "RaoBlackwell", "MonteCarlo"]
COMPARISONS = {
    "step-1": _against_trl(1, cycles=3),
    "step-4": _against_trl(4, cycles=2),
    "step-estimators": Comparison(
        "RLOO with one inner step, estimators",
        [_rloo(f"`{name}`", "our_rloo", 1, estimator=name) for name in ESTIMATORS],
        "1.05",
        "1.02",
        cycles=3,
    ),
    **{f"step-{work}": _other(work, "tiny GPT-2", 0, case.tiny, 8) for work in OTHERS},
    **{
        f"smollm2-bf16-{work}": _other(
            work, "SmolLM2-135M, bf16-mixed", 1, functools.partial(_smollm2, "bf16-mixed", None), 5
        )
        for work in OTHERS
    },
    **{
        f"smollm2-{name}-{steps}{'-lora' * lora}": _on_smollm2(precision, steps, lora)
        for name, precision in (("fp32", "32-true"), ("bf16", "bf16-mixed"))
        for steps in (1, 4)
        for lora in (False, True)
    },
}


def memory(task: case.Task, key: str, index: int) -> float:
    """Peak memory of a variant, in MB; run in a separate process."""
    warnings.simplefilter("ignore")
    variant = COMPARISONS[key].variants[index]
    return peak_megabytes(lambda: None, lambda: variant.run(task, cycles=2))


def take_turns(
    comparison: Comparison, task: case.Task, rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Times of a cycle of all variants in all rounds, and the shares in the last round."""
    times: dict[str, list[float]] = {variant.label: [] for variant in comparison.variants}
    shares: dict[str, dict[str, float]] = {}
    for number_ in range(rounds):
        for variant in comparison.variants:
            print(f"round {number_ + 1} of {rounds}: {variant.label}", file=sys.stderr)
            seconds, shares[variant.label] = variant.run(task, comparison.cycles)
            times[variant.label].append(seconds)
    return times, shares


def tables(
    comparison: Comparison,
    task: case.Task,
    times: dict[str, list[float]],
    shares: dict[str, dict[str, float]],
    peaks: dict[str, float],
) -> str:
    """Tables of seconds, tokens per second, shares and memory, and of the ratios."""
    rows = []
    fastest = matrix_product_rate(task.dtype)
    # Cycles of the products alone; only TRL has the head in the precision of the rest
    alone = {
        epochs: [floor.seconds(task, epochs, head) for head in (task.dtype, torch.float32)]
        for epochs in {variant.options.get("inner_epochs") for variant in comparison.variants}
        if isinstance(epochs, int)
    }
    for variant in comparison.variants:
        seconds, parts = statistics.median(times[variant.label]), shares[variant.label]
        stages = [f"{parts[stage]:.0%}" if parts else "–" for stage in ("generate", "statistics", "update")]
        inner_epochs = variant.options.get("inner_epochs")
        of_peak = ["–"] * 3
        if isinstance(inner_epochs, int):
            ideal = task.operations(inner_epochs) / fastest
            of_peak = [f"{ideal / spent:.0%}" for spent in (seconds, *alone[inner_epochs])]
        cells = [number(seconds), number(task.tokens / seconds), *stages, *of_peak]
        rows.append([variant.label, *cells, number(peaks.get(variant.label))])
    header = ["variant", "seconds", "tokens/s", "generate", "statistics", "update"]
    header += ["of peak", "floor", "floor, float32 head", "extra MB"]
    ratios = [
        [f"{one} / {other.split(': ')[1]}", comparison.bar, comparison.goal, spread(times, one, other)]
        for one, other in itertools.combinations(times, 2)
        if "TRL" not in one
    ]
    return (
        f"The fastest product of two large matrices: {fastest / 1e9:.0f} GFLOP/s, {task.precision}.\n\n"
        + markdown(header, rows)
        + "\n\n"
        + markdown(["ratio", "bar", "goal", "measured"], ratios)
    )


def report(key: str, quick: bool) -> str:
    """The part of the document about one comparison."""
    warnings.simplefilter("ignore")
    comparison = COMPARISONS[key]
    text = HEADING.format(title=comparison.title, key=key, machine=machine(PACKAGES))
    with tempfile.TemporaryDirectory() as name:
        task = comparison.task(Path(name))
        if not task.folder.exists():
            return f"{text}Not measured: {task.folder} does not exist; `make chat` makes it.\n"
        times, shares = take_turns(comparison, task, 1 if quick else comparison.rounds)
        peaks = {}
        if not quick:
            for index, variant in enumerate(comparison.variants):
                peaks[variant.label] = in_own_process(memory, task, key, index)
        return text + tables(comparison, task, times, shares, peaks)
