"""The source files that a module depends on: its own and those of all it imports, found without importing."""

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Packages that are followed beside those of the modules themselves.
OWN = ("lit_klrb", "analysis")


class Source(NamedTuple):
    """What is used of a file.

    Attributes:
        hash: Hash of its syntax without comments, layout and docstrings.
        imports: Level (number of leading dots), module and names of each of its imports.
    """

    hash: str
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]


def import_closure(modules: Iterable[str]) -> dict[str, Path]:
    """The files of modules and of all that they import from their own packages and from ours, by module name.

    Imports inside functions count, and so do the packages above a module, which Python imports first. Imports
    whose name is computed do not: a dispatcher imports its commands in this way.
    """
    waiting = list(modules)
    roots = {name: package_root(name) for name in (*OWN, *(name.partition(".")[0] for name in waiting))}
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        top, *inner = name.split(".")
        path = _file(roots.get(top), inner)
        if path is not None and name not in found:
            found[name] = path
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            waiting += [name.rpartition(".")[0], *_imported(path, package)]
    return found


def package_root(package: str) -> Path | None:
    """The folder of an installed package, or the file of a module; None if there is neither."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin) if spec.submodule_search_locations is None else Path(spec.origin).parent


@functools.cache  # a plan's ids and a report's code share most files
def parsed(content: bytes) -> Source:
    """The hash and the imports of a Python file."""
    tree = ast.parse(content)
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:]
    return Source(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imports))


def _imported(path: Path, package: str) -> Iterator[str]:
    """Names of the modules that a file of a package imports; some may be of objects inside a module."""
    above = package.split(".")
    for level, module, names in parsed(path.read_bytes()).imports:
        parents = above[: len(above) - level + 1] if level else []
        start = ".".join([*parents, *filter(None, [module])])
        yield from (start, *(f"{start}.{name}" for name in names))


def _file(root: Path | None, inner: list[str]) -> Path | None:
    if root is None or root.suffix:
        return root if not inner else None
    path = root.joinpath(*inner)
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in candidates if file.is_file()), None)
