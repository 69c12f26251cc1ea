"""`python -m benchmarks [--quick] [--runs FOLDER] [part ...]`."""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import certificates, distillation, families, logprobs, op, rounds, step, topk, variance
from .measure import DEVICE
from .table import replace_part

EVIDENCE = Path(__file__).parents[1] / "replication" / "evidence"
BENCHMARKS, VARIANCE, CERTIFICATES, TOPK, FAMILIES = (
    EVIDENCE / f"{name}.md" for name in ("benchmarks", "variance", "certificates", "topk", "families")
)
PARTS: dict[str, tuple[Callable[..., str], Path]] = {
    **{key: (partial(op.report, key), BENCHMARKS) for key in op.SIZES},
    **{f"{key}-rounds": (partial(rounds.report, key), BENCHMARKS) for key in rounds.ROUNDS},
    "logprobs": (logprobs.report, BENCHMARKS),
    **{key: (partial(step.report, key), BENCHMARKS) for key in step.COMPARISONS},
    **{key: (partial(variance.report, key), VARIANCE) for key in variance.SETTINGS},
    "variance-distillation": (distillation.report, VARIANCE),
    "topk": (topk.report, TOPK),
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
        choices=[[], *PARTS],
        metavar="part",
        help=f"of {', '.join(PARTS)}; all by default",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, printed, not written, as on a GPU")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help=f"where {', '.join(sorted(TRAINING))} find and leave runs; a temporary folder by default",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.parts or PARTS:
            report, document = PARTS[name]
            runs = (arguments.runs or Path(folder),) if name in TRAINING else ()
            text = report(arguments.quick, *runs)
            if not arguments.quick and DEVICE.type == "cpu":
                replace_part(document, name, text)
            print(text)


if __name__ == "__main__":
    main()
