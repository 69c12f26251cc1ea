"""Training steps, compared with TRL's."""

import itertools
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

from . import step_case as case
from .measure import in_own_process, machine, peak_megabytes
from .table import markdown, number, spread

PACKAGES = ["torch", "transformers", "trl", "lightning"]
ROUNDS = 8
HEADING = """### {title}

`python -m benchmarks {key}` on {machine}.

"""


class Variant(NamedTuple):
    """A trainer on a task; `function` returns the time of a cycle and the shares of its stages."""

    label: str
    function: str
    options: dict[str, object]

    def run(self, folder: Path, cycles: int) -> tuple[float, dict[str, float]]:
        """Train for a number of cycles."""
        from . import step_runs  # TRL takes seconds to import, and may not be installed

        found: tuple[float, dict[str, float]] = getattr(step_runs, self.function)(
            folder, cycles=cycles, **self.options
        )
        return found


def _rloo(name: str, function: str, inner_epochs: int, **options: object) -> Variant:
    label = f"RLOO, {inner_epochs} inner step{'s' * (inner_epochs > 1)}: {name}"
    return Variant(label, function, {"inner_epochs": inner_epochs, **options})


class Comparison(NamedTuple):
    """Variants that take turns, each training some cycles, of which the first is not counted.

    The time of each is divided by that of the later ones; bar and goal are for every such ratio.
    """

    title: str
    variants: list[Variant]
    bar: str
    goal: str
    cycles: int


def _against_trl(inner_epochs: int, cycles: int) -> Comparison:
    variants = [
        _rloo("**ours, `RaoBlackwell`**", "our_rloo", inner_epochs, estimator="RaoBlackwell"),
        _rloo("TRL `RLOOTrainer`", "trl_rloo", inner_epochs),
    ]
    steps = "one inner step" if inner_epochs == 1 else f"{inner_epochs} inner steps"
    return Comparison(f"RLOO with {steps}, and TRL", variants, "0.45", "0.40", cycles)


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
    "step-dpo": Comparison(
        "DPO, and TRL",
        [
            Variant("DPO: **ours**", "our_dpo", {}),
            Variant("DPO: TRL `DPOTrainer`, reference taken before", "trl_dpo", {"precompute": True}),
            Variant("DPO: TRL `DPOTrainer`", "trl_dpo", {"precompute": False}),
        ],
        "0.8",
        "0.5",
        cycles=3,
    ),
}


def memory(folder: Path, key: str, index: int) -> float:
    """Peak memory of a variant, in MB; run in a separate process."""
    warnings.simplefilter("ignore")
    variant = COMPARISONS[key].variants[index]
    return peak_megabytes(lambda: None, lambda: variant.run(folder, cycles=2))


def take_turns(
    comparison: Comparison, folder: Path, rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Times of a cycle of all variants in all rounds, and the shares in the last round."""
    times: dict[str, list[float]] = {variant.label: [] for variant in comparison.variants}
    shares: dict[str, dict[str, float]] = {}
    for number_ in range(rounds):
        for variant in comparison.variants:
            print(f"round {number_ + 1} of {rounds}: {variant.label}", file=sys.stderr)
            seconds, shares[variant.label] = variant.run(folder, comparison.cycles)
            times[variant.label].append(seconds)
    return times, shares


def tables(
    comparison: Comparison,
    times: dict[str, list[float]],
    shares: dict[str, dict[str, float]],
    peaks: dict[str, float],
) -> str:
    """Tables of seconds, tokens per second, shares and memory, and of the ratios."""
    tokens = case.PROMPTS * case.COMPLETIONS_PER_PROMPT * case.COMPLETION_TOKENS
    rows = []
    for label, values in times.items():
        seconds, parts = statistics.median(values), shares[label]
        stages = [f"{parts[stage]:.0%}" if parts else "–" for stage in ("generate", "statistics", "update")]
        rows.append([label, number(seconds), number(tokens / seconds), *stages, number(peaks.get(label))])
    header = ["variant", "seconds", "tokens/s", "generate", "statistics", "update", "extra MB"]
    ratios = [
        [f"{one} / {other.split(': ')[1]}", comparison.bar, comparison.goal, spread(times, one, other)]
        for one, other in itertools.combinations(times, 2)
        if "TRL" not in one
    ]
    return markdown(header, rows) + "\n\n" + markdown(["ratio", "bar", "goal", "measured"], ratios)


def report(key: str, quick: bool) -> str:
    """The part of the document about one comparison."""
    warnings.simplefilter("ignore")
    comparison = COMPARISONS[key]
    text = HEADING.format(title=comparison.title, key=key, machine=machine(PACKAGES))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.build(folder)
        times, shares = take_turns(comparison, folder, 1 if quick else ROUNDS)
        peaks = {}
        if not quick:
            for index, variant in enumerate(comparison.variants):
                peaks[variant.label] = in_own_process(memory, folder, key, index)
    return text + tables(comparison, times, shares, peaks)
