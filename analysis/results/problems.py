"""Problems of the files of a sweep, which `consistency` and its neighbours find."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key")


@dataclass(frozen=True)
class Problem:
    """A problem with the files of a sweep.

    Attributes:
        text: One line that names the problem and the file.
        serious: Whether it rules out a verdict, because the design that the tests assume cannot be trusted.
        unread: Whether it is a file that could not be read, whose content is not known.
        kind: What it has in common with others that are counted with it; "" if it stands alone.
        count: Number of such problems, of which the text is about the first.
    """

    text: str
    serious: bool = False
    unread: bool = False
    kind: str = ""
    count: int = 1


def counted(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, of each kind the first with their number."""
    groups: dict[object, list[Problem]] = defaultdict(list)
    for number, problem in enumerate(problems):
        groups[(problem.kind, problem.serious, problem.unread) if problem.kind else number].append(problem)
    return [
        first
        if not others
        else replace(first, text=f"{first.text}; and {len(others)} more", count=1 + len(others))
        for first, *others in groups.values()
    ]


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Runs or cells by what they have in common."""
    groups: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups
