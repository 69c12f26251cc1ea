"""Run directories: nothing a run left is overwritten by the next one."""

from pathlib import Path

from lit_klrb import schema


def set_aside(root: Path) -> Path | None:
    """Make room for a new run: an earlier one in the same place is renamed, never overwritten.

    Args:
        root: The run directory.

    Returns:
        The earlier run's new place, `root` with the first free number appended; None if there was none.
    """
    if not any((root / name).exists() for name in (schema.CONFIG, schema.SUMMARY, schema.CHECKPOINT)):
        return None
    number = 1
    while (kept := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    root.rename(kept)
    print(f"kept the earlier run as {kept}")
    return kept


def next_attempt(root: Path) -> int:
    """How many attempts at this run have written metrics before."""
    return len(list((root / schema.METRICS_DIR).glob("attempt_*")))
