"""Lines about what a run does in another way than asked or expected, each shown once per process."""

import sys

from lightning.pytorch.utilities import rank_zero_only

_said: set[str] = set()


@rank_zero_only
def say_once(line: str) -> None:
    """Print a line on the standard error, unless this process has, by the first of several processes."""
    if line not in _said:
        _said.add(line)
        print(f"note: {line}", file=sys.stderr, flush=True)
