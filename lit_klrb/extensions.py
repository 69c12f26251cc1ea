"""What other installed packages add, found by their entry points: commands and directions of estimators.

A package names them in its pyproject.toml, for example `[project.entry-points."lit_klrb.directions"]`;
docs/extending.md has an example of each.
"""

import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lit_klrb.errors import refusing

COMMANDS, DIRECTIONS = "lit_klrb.commands", "lit_klrb.directions"


def extensions(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; nothing is imported."""
    return _entry_points(group, tuple(sys.path))


@functools.cache  # a search reads a file of each package, and estimators are copied in each step
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}


def load(entry: EntryPoint) -> Any:
    """What an entry point names."""
    with refusing(f"{entry.group}: {entry.name} ({entry.value}) cannot be imported"):
        return entry.load()
