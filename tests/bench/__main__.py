"""`python -m tests.bench [--quick] [part ...]`."""

import argparse
from pathlib import Path

from . import op, step, variance
from .table import replace_part

DOCS = Path(__file__).parents[2] / "docs"
PARTS = {
    "op": (op.report, DOCS / "benchmarks.md"),
    "step": (step.report, DOCS / "benchmarks.md"),
    "variance": (variance.report, DOCS / "control_variate.md"),
}


def main() -> None:
    """Run the parts asked for; each rewrites its own part of the document, as far as it has come."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
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
        for text in report(arguments.quick):
            if not arguments.quick:
                replace_part(document, name, text)
        print(text)


if __name__ == "__main__":
    main()
