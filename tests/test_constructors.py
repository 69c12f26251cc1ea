"""Constructors name and document all arguments; classes are abstract or final."""

import inspect

import jsonargparse
import pytest

from lit_klrb import callbacks, modules, studies
from lit_klrb.data import modules as data_modules
from lit_klrb.data.base import CorpusDataModule


def public_classes():
    found = [c for room in (modules, callbacks, studies) for c in vars(room).values() if inspect.isclass(c)]
    found += [
        c for c in vars(data_modules).values() if inspect.isclass(c) and issubclass(c, CorpusDataModule)
    ]
    # Lightning's checkpoint callback and progress bar pass all arguments on to their base classes.
    return [
        c
        for c in found
        if not issubclass(c, Exception) and c.__name__ not in ("RunCheckpoint", "RunProgressBar")
    ]


def undocumented(kind):
    """Arguments of a class without help text."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "x", fail_untyped=False)
    return [a.dest for a in parser._actions if a.dest.startswith("x.") and not (a.help or "").strip("% ")]


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: kind.__name__)
def test_every_argument_has_a_name_and_an_explanation(kind):
    parameters = inspect.signature(kind).parameters.values()
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert all(p.annotation is not p.empty for p in parameters)
    assert undocumented(kind) == []


def test_an_argument_without_a_word_would_be_found():
    class Bad:
        """Bad.

        Args:
            told: What it is.
        """

        def __init__(self, told: int = 1, silent: int = 2) -> None: ...

    assert undocumented(Bad) == ["x.silent"]
