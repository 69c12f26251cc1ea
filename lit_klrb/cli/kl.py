"""`lit-klrb kl`: the KL of two given models, with its error."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lit_klrb.cli.arguments import Arguments
from lit_klrb.terminal import print_lines, say_loading

if TYPE_CHECKING:
    from lit_klrb.comparison.compare import Measured
    from lit_klrb.comparison.measure import Advance

EPILOG = """with --prompts, completions are sampled from the policy (and, for the other direction, from the
reference); with --texts, the KL of the next token is averaged over the given contexts, which is another
quantity.

example: lit-klrb kl --policy runs/policy --reference gpt2 --prompts prompts.jsonl
"""


def parser() -> Arguments:
    """The parser of the command's options."""
    command = Arguments("kl", __doc__, EPILOG)
    model = "a hub id, a folder, a .gguf file or a checkpoint"
    add = command.add_argument
    add("--policy", required=True, metavar="A", help=model)
    add("--reference", required=True, metavar="B", help=model)
    sources = command.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--prompts",
        metavar="FILE",
        help="a .jsonl or .parquet file with the column prompt (texts or conversations) or messages, and "
        "maybe teacher_prompt, which the reference reads instead; or a .txt file with one prompt per line",
    )
    sources.add_argument(
        "--texts",
        metavar="FILE",
        help="a .jsonl or .parquet file with the column text, or a .txt file with one text per line",
    )
    add("--direction", choices=("both", "forward", "reverse"), default="both",
        help="forward is KL(policy‖reference), the penalty of RLHF, and needs half the time of both, the "
        "default; reverse is KL(reference‖policy)")  # fmt: skip
    add("--completions_per_prompt", type=_positive(int), default=4, metavar="K", help="4 by default")
    add("--max_new_tokens", type=_positive(int), default=64, metavar="T",
        help="maximum number of tokens of a completion; 64 by default")  # fmt: skip
    add("--max_tokens", type=_positive(int), default=512, metavar="N",
        help="longer texts are cut into windows of this many tokens; 512 by default")  # fmt: skip
    add("--temperature", type=_positive(float), default=1.0, help="divides all logits; 1 by default")
    add("--system", metavar="TEXT", help="a system prompt for the chat template")
    add("--teacher_system", metavar="TEXT",
        help="the reference's own system prompt; or see the column teacher_prompt")  # fmt: skip
    add("--limit", type=_positive(int), default=0, metavar="N", help="use only the first prompts or texts")
    add("--batch_size", type=_positive(int), default=8, metavar="N",
        help="prompts or windows per forward pass; 8 by default")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of the completions; 0 by default")
    add("--level", type=_level, default=0.95, help="confidence level of the intervals; 0.95 by default")
    add("--device", default=None, help="such as cpu or cuda; cuda by default if there is one")
    add("--json", action="store_true", help="print JSON")
    return command


def _positive(kind: type[float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
        return value

    convert.__name__ = kind.__name__  # how argparse calls it in errors
    return convert


def _level(text: str) -> float:
    value = float(text)
    if not 0.5 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0.5 and below 1, got {text}")
    return value


def main(argv: Sequence[str]) -> int:
    """Run `kl` and return the exit code."""
    options = parser().parse_args(argv)
    from lit_klrb.comparison.report import print_report, summary
    from lit_klrb.functional.statistics import FEW_PROMPTS
    from lit_klrb.models.loading import silence

    silence()
    say_loading(f"loading {options.policy} and {options.reference}")
    measured = _measured(options)
    prompts = min(table.clusters for table in measured.tables.values())
    if prompts < FEW_PROMPTS:
        few = f"{prompts} {'texts' if options.prompts is None else 'prompts'}, too few for standard errors"
        print_lines(f"warning: {few}: give at least {FEW_PROMPTS}", stream=sys.stderr)
    document = summary(measured, options.level)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print_report(document)
    return 0


def _measured(options: argparse.Namespace) -> "Measured":
    """Measure, with a progress bar on a terminal."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from lit_klrb.comparison.compare import ModelComparison
    from lit_klrb.engine.generation import Sampling
    from lit_klrb.models.folders import check_device

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    known = ModelComparison.__dataclass_fields__
    comparison = ModelComparison(
        directions=("forward", "reverse") if options.direction == "both" else (options.direction,),
        sampling=Sampling(options.completions_per_prompt, options.max_new_tokens, options.temperature),
        **{name: value for name, value in vars(options).items() if name in known} | {"device": device},
    )
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:

        def track(description: str, total: int) -> "Advance":
            task = progress.add_task(description, total=total)
            return lambda rows: progress.advance(task, rows)

        return comparison.run(track)
