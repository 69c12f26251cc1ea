"""Training steps, compared with TRL's."""

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
ROUNDS, PAIR_ROUNDS, CYCLES = 4, 8, 3
HEADING = """## Training steps

`python -m benchmarks step` on {machine}.

A GPT-2 of {layers} layers, {width} wide, V = {vocabulary:,}, untrained, float32. RLOO: {prompts} prompts of
{prompt} tokens, {k} completions each of {completion} tokens, a reward through the text that costs nothing, KL
term, clipping; seconds of a whole cycle of sampling, scoring and all inner steps. DPO: {pairs} pairs of the
same lengths; we take the reference's log-probabilities before training, so TRL is measured both ways. Each
variant trains {cycles} cycles in its turn, of which the first is not counted; ratios are medians over the
rounds, quartiles in brackets. Extra memory is the peak of the resident set in a process of its own, beyond
libraries.
"""


class Variant(NamedTuple):
    """A trainer on a task; `function` returns the time of a cycle and the shares of its stages."""

    label: str
    function: str
    options: dict[str, object]

    def run(self, folder: Path, cycles: int = CYCLES) -> tuple[float, dict[str, float]]:
        """Train for a number of cycles."""
        from . import step_runs  # TRL takes seconds to import, and may not be installed

        found: tuple[float, dict[str, float]] = getattr(step_runs, self.function)(
            folder, cycles=cycles, **self.options
        )
        return found


def _rloo(name: str, function: str, inner_epochs: int, **options: object) -> Variant:
    label = f"RLOO, {inner_epochs} inner step{'s' * (inner_epochs > 1)}: {name}"
    return Variant(label, function, {"inner_epochs": inner_epochs, **options})


RB, MC, TRL = {}, {}, {}
for inner in (1, 4):
    RB[inner] = _rloo("**ours, `RaoBlackwell`**", "our_rloo", inner, estimator="RaoBlackwell")
    MC[inner] = _rloo("ours, `MonteCarlo`", "our_rloo", inner, estimator="MonteCarlo")
    TRL[inner] = _rloo("TRL `RLOOTrainer`", "trl_rloo", inner)
DPO = Variant("DPO: **ours**", "our_dpo", {})
TRL_DPO = [
    Variant("DPO: TRL `DPOTrainer`, reference taken before", "trl_dpo", {"precompute": True}),
    Variant("DPO: TRL `DPOTrainer`", "trl_dpo", {"precompute": False}),
]
VARIANTS = [*(group[inner] for inner in (1, 4) for group in (RB, MC, TRL)), DPO, *TRL_DPO]
# Variant, base, bar and goal.
RATIOS = [
    *((RB[inner], TRL[inner], "0.45", "0.33") for inner in (1, 4)),
    *((DPO, peer, "0.8", "0.5") for peer in TRL_DPO),
]


def memory(folder: Path, index: int) -> float:
    """Peak memory of a variant, in MB; run in a separate process."""
    warnings.simplefilter("ignore")
    variant = VARIANTS[index]
    return peak_megabytes(lambda: None, lambda: variant.run(folder, cycles=2))


def take_turns(
    variants: list[Variant], folder: Path, rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Times of a cycle of all variants in all rounds, and the shares in the last round."""
    times: dict[str, list[float]] = {variant.label: [] for variant in variants}
    shares: dict[str, dict[str, float]] = {}
    for number_ in range(rounds):
        for variant in variants:
            print(f"round {number_ + 1} of {rounds}: {variant.label}", file=sys.stderr)
            seconds, shares[variant.label] = variant.run(folder)
            times[variant.label].append(seconds)
    return times, shares


def tables(
    times: dict[str, list[float]],
    shares: dict[str, dict[str, float]],
    pair_times: dict[str, list[float]],
    peaks: dict[str, float],
) -> str:
    """Tables of seconds, tokens per second, shares and memory, and of the ratios with goals."""
    tokens = case.PROMPTS * case.COMPLETIONS_PER_PROMPT * case.COMPLETION_TOKENS
    rows = []
    for label, values in times.items():
        seconds, parts = statistics.median(values), shares[label]
        stages = [f"{parts[stage]:.0%}" if parts else "–" for stage in ("generate", "statistics", "update")]
        rows.append([label, number(seconds), number(tokens / seconds), *stages, number(peaks.get(label))])
    header = ["variant", "seconds", "tokens/s", "generate", "statistics", "update", "extra MB"]
    ratios = [
        [f"{ours.label} / {peer.label.split(': ')[1]}", bar, goal, spread(times, ours.label, peer.label)]
        for ours, peer, bar, goal in RATIOS
    ]
    rb, mc = RB[1].label, MC[1].label
    ratios.append([f"{rb} / `MonteCarlo` ({PAIR_ROUNDS} rounds)", "1.05", "1.02", spread(pair_times, rb, mc)])
    return markdown(header, rows) + "\n\n" + markdown(["ratio", "bar", "goal", "measured"], ratios)


def report(quick: bool) -> str:
    """The part of the document."""
    warnings.simplefilter("ignore")
    text = HEADING.format(
        machine=machine(PACKAGES),
        layers=case.LAYERS,
        width=case.WIDTH,
        vocabulary=case.VOCABULARY,
        prompts=case.PROMPTS,
        prompt=case.PROMPT_TOKENS,
        k=case.COMPLETIONS_PER_PROMPT,
        completion=case.COMPLETION_TOKENS,
        pairs=case.PAIRS,
        cycles=CYCLES,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.build(folder)
        times, shares = take_turns(VARIANTS, folder, 1 if quick else ROUNDS)
        pair_times, _ = take_turns([RB[1], MC[1]], folder, 2 if quick else PAIR_ROUNDS)
        peaks = {} if quick else {v.label: in_own_process(memory, folder, i) for i, v in enumerate(VARIANTS)}
    return text + "\n" + tables(times, shares, pair_times, peaks)
