"""Differences between two nested documents."""

from collections.abc import Iterator
from typing import Any

_ABSENT = "nothing"


def changes(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Yield one line per key in which two documents of mappings and plain values differ.

    Example:
        >>> list(changes({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": 4}))
        ['a.b: 1 -> 3', 'd: nothing -> 4']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            path = f"{key}.{name}" if key else name
            yield from changes(old.get(name, _ABSENT), new.get(name, _ABSENT), path)
    elif old != new:
        yield f"{key}: {old} -> {new}"
