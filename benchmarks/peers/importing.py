"""Importing modules of other software without what their engines need, and from git snapshots."""

import ast
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import inspect
import subprocess
import sys
import types
import typing
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typing_extensions


class _Missing(type):
    """Attributes of a class that is not there are such classes, too, and it is a decorator."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if "decorates" in vars(cls) and len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return super().__call__(*arguments, **options)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class Absent(metaclass=_Missing):
    """Stands for whatever a module that is not installed has: a base class, a decorator, a function."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        """Itself, or as a decorator what it decorates."""
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _AbsentModule(types.ModuleType):
    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class of its own, as two of them can be bases of one class
        setattr(self, name, _Missing(name, (Absent,), {"decorates": True}))
        return getattr(self, name)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the given names, and what is below them, as empty ones."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A specification for a name that is, or lies below, a stubbed one."""
        if any(name == stub or name.startswith(f"{stub}.") for stub in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """An empty module."""
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is run."""


STUBS = Stubs()


def load(module: str, *stubs: str) -> Any:
    """Import a module, with stubs for the modules that it misses and for the given ones.

    Raises:
        ImportError: If it, or a part of its own package, is not there.
    """
    if STUBS not in sys.meta_path:
        sys.meta_path.insert(0, STUBS)
        # pydantic refuses the standard one before Python 3.12, which some of this software needs
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    STUBS.names.update(stubs)
    package = module.partition(".")[0]
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not error.name or error.name.partition(".")[0] == package or error.name in STUBS.names:
                raise
            STUBS.names.add(error.name)
            forget(package)


def forget(package: str) -> None:
    """Forget what is imported of a package, so that it is imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def bare(kind: type, **attributes: Any) -> Any:
    """An object of a class with these attributes, without its constructor, which would load models."""
    new = object.__new__(kind)
    new.__dict__.update(attributes)
    return new


def field_default(config: Any, name: str) -> Any:
    """The default of a field of a dataclass or a pydantic model."""
    if dataclasses.is_dataclass(config):
        return next(field.default for field in dataclasses.fields(config) if field.name == name)
    return config.model_fields[name].default


def parameter_default(function: Callable[..., Any], name: str) -> Any:
    """The default of a parameter of a function."""
    return inspect.signature(function).parameters[name].default


class Source(typing.NamedTuple):
    """Where a package's code is from."""

    version: str  # of the wheel, or the commit of the snapshot
    date: str  # of the wheel's newest file, or of the commit; empty where the wheel has none


def wheel_source(distribution: str, wheels: Path) -> Source:
    """The version of an installed wheel and the date of its newest file."""
    number = version(distribution)
    pattern = f"{distribution.replace('-', '_')}-{number}-*.whl"
    for path in wheels.glob(pattern):
        with zipfile.ZipFile(path) as wheel:
            year, month, day = max(entry.date_time for entry in wheel.infolist())[:3]
        # Some builders write this day into every file
        return Source(number, "" if year <= 2020 else f"{year}-{month:02}-{day:02}")
    return Source(number, "")


def unpack(snapshots: Path, repository: str, folders: Sequence[str], target: Path) -> Source | None:
    """Write folders of a snapshot's newest commit below `target`; None if there is no such snapshot.

    Args:
        snapshots: A folder with git directories named owner+name, or owner+name/repo.
        repository: owner/name.
        folders: The paths to write.
        target: Where to write them.
    """
    place = snapshots / repository.replace("/", "+")
    git = ["git", "-C", str(place / "repo" if (place / "repo").exists() else place)]
    if not place.exists():
        return None
    target.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run([*git, "archive", "HEAD", *folders], check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", str(target)], check=True, input=archive.stdout)
    shown = subprocess.run([*git, "log", "-1", "--format=%h %cs"], check=True, capture_output=True, text=True)
    commit, date = shown.stdout.split()
    return Source(commit, date)


def argument_defaults(script: Path) -> dict[str, Any]:
    """The defaults of the options that a script adds to an `argparse` parser, by name without dashes."""
    defaults: dict[str, Any] = {}
    for call in ast.walk(ast.parse(script.read_text("utf-8"))):
        if (
            not isinstance(call, ast.Call)
            or getattr(call.func, "attr", "") != "add_argument"
            or not call.args
        ):
            continue
        names = [word.value for word in call.args if isinstance(word, ast.Constant)]
        values = {keyword.arg: keyword.value for keyword in call.keywords}
        default = values.get("default")
        if isinstance(default, ast.Constant):
            value = default.value
        else:
            value = False if isinstance(values.get("action"), ast.Constant) else None
        defaults |= {str(name).lstrip("-"): value for name in names}
    return defaults
