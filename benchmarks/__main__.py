"""`python -m benchmarks [--quick] [--runs FOLDER] [part ...]`; training steps beside TRL's by default."""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import (
    certificates,
    distillation,
    families,
    heads,
    logprobs,
    op,
    products,
    rounds,
    sampling,
    step,
    step_table,
    topk,
    variance,
)
from .measure import DEVICE
from .table import replace_part

EVIDENCE = Path(__file__).parents[1] / "replication" / "evidence"
BENCHMARKS, VARIANCE, CERTIFICATES, TOPK, FAMILIES = (
    EVIDENCE / f"{name}.md" for name in ("benchmarks", "variance", "certificates", "topk", "families")
)
STEPS = [f"step-{key}" for key in step.WORKS]
PARTS: dict[str, tuple[Callable[..., str], Path | None]] = {
    **{key: (partial(op.report, key), BENCHMARKS) for key in op.SIZES},
    **{f"{key}-rounds": (partial(rounds.report, key), BENCHMARKS) for key in rounds.ROUNDS},
    "logprobs": (logprobs.report, BENCHMARKS),
    "products": (products.report, BENCHMARKS),
    "sampling": (sampling.report, BENCHMARKS),
    **{name: (partial(step_table.report, key), None) for name, key in zip(STEPS, step.WORKS, strict=True)},
    **{key: (partial(variance.report, key), VARIANCE) for key in variance.SETTINGS},
    "variance-distillation": (distillation.report, VARIANCE),
    "topk": (topk.report, TOPK),
    "heads": (heads.report, TOPK),
    "certificates": (certificates.report, CERTIFICATES),
    "families": (families.report, FAMILIES),
}
# These train models first.
TRAINING = {*variance.SETTINGS, "variance-distillation", "topk"}


def main() -> None:
    """Run the requested parts, each of which updates its part of the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[[], "steps", *PARTS],
        metavar="part",
        help=f"of steps, {', '.join(PARTS)}",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, printed, not written, as on a GPU")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help=f"where {', '.join(sorted(TRAINING))} find and leave runs; a temporary folder by default",
    )
    arguments = parser.parse_args()
    given = arguments.parts or ["steps"]
    names = [name for part in given for name in (STEPS if part == "steps" else [part])]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            report, document = PARTS[name]
            runs = (arguments.runs or Path(folder),) if name in TRAINING else ()
            text = report(arguments.quick, *runs)
            print(text)
            if arguments.quick or DEVICE.type != "cpu":
                continue
            if document is None:  # what was kept of all machines is one part
                replace_part(BENCHMARKS, "steps", step_table.page())
            else:
                replace_part(document, name, text)


if __name__ == "__main__":
    main()
