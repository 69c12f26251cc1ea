"""`python -m benchmarks [--quick] [part ...]`."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import certificates, op, rounds, step, topk, variance
from .table import replace_part

DOCS = Path(__file__).parents[1] / "docs"
BENCHMARKS, CONTROL_VARIATE, CERTIFICATES, TOPK = (
    DOCS / f"{name}.md" for name in ("benchmarks", "control_variate", "certificates", "topk")
)
PARTS: dict[str, tuple[Callable[[bool], str], Path]] = {
    **{key: (partial(op.report, key), BENCHMARKS) for key in op.SIZES},
    **{f"{key}-rounds": (partial(rounds.report, key), BENCHMARKS) for key in rounds.ROUNDS},
    **{key: (partial(step.report, key), BENCHMARKS) for key in step.COMPARISONS},
    "variance": (variance.report, CONTROL_VARIATE),
    "topk": (topk.report, TOPK),
    "certificates": (certificates.report, CERTIFICATES),
}


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
    parser.add_argument("--quick", action="store_true", help="small sizes, printed and not written")
    arguments = parser.parse_args()
    for name in arguments.parts or PARTS:
        report, document = PARTS[name]
        text = report(arguments.quick)
        if not arguments.quick:
            replace_part(document, name, text)
        print(text)


if __name__ == "__main__":
    main()
