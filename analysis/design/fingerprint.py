"""Hashes of everything that the result of a cell depends on.

Cells have the same id if and only if their results must be equal. The id depends on the resolved
configuration of the stage, the overrides, the ids of the cells from whose checkpoints it starts, the code,
and the versions of packages that affect floating-point results. It does not depend on the location of files
or the display of progress; local models and data sets enter with their content.

The code is the source files of a module and of all it imports, found without importing.
"""

import ast
import functools
import hashlib
import platform
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from analysis.results.store import digest
from lit_klrb.errors import ConfigurationError
from lit_klrb.redaction import environment_names, resolved_without_environment

# Packages that are followed beside those of the modules themselves.
OWN = ("lit_klrb", "analysis")


def import_closure(modules: Iterable[str]) -> dict[str, Path]:
    """The files of modules and of all that they import from their own packages and from ours, by module name.

    Imports inside functions count, and so do the packages above a module, which Python imports first. Imports
    whose name is computed do not: a dispatcher imports its commands in this way.
    """
    waiting = list(modules)
    roots = {name: package_root(name) for name in (*OWN, *(name.partition(".")[0] for name in waiting))}
    paths: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        path = _file(roots.get(name.partition(".")[0]), name.split(".")[1:])
        if path is None or name in paths:
            continue
        paths[name] = path
        above = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        waiting.append(name.rpartition(".")[0])
        for level, module, names in parsed(path.read_bytes())[1]:
            parents = above[: len(above) - level + 1] if level else []
            start = ".".join([*parents, *filter(None, [module])])
            waiting += [start, *(f"{start}.{each}" for each in names)]  # some are of objects inside a module
    return paths


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
def parsed(content: bytes) -> tuple[str, tuple[tuple[int, str, tuple[str, ...]], ...]]:
    """The hash of a Python file's syntax, without comments, layout and docstrings, and its imports.

    Of each import: the level (number of leading dots), the module and the names.
    """
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
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imports)


def _file(root: Path | None, inner: list[str]) -> Path | None:
    if root is None or root.suffix:
        return root if not inner else None
    path = root.joinpath(*inner)
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in candidates if file.is_file()), None)


def content_hash(path: Path) -> str:
    """Hash of a file's bytes, of a checkpoint's tensors, or of the names and contents of a folder's files."""
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file())
        return digest({file.relative_to(path).as_posix(): content_hash(file) for file in files})
    # The rest of a checkpoint has paths and times, so that a run repeated elsewhere writes other bytes
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        sums = {about.filename: (about.file_size, about.CRC) for about in archive.infolist()}
        if tensors := {name: sums[name] for name in sums if re.search(r"/data/\d+$", name)}:
            return digest(tensors)
    status = path.stat()
    return _hash_of_bytes(path, status.st_mtime_ns, status.st_size)


@functools.cache  # hundreds of cells have the same models and data
def _hash_of_bytes(path: Path, modified: int, size: int) -> str:
    """The hash of a file; computed again if its size or modification time changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Keys of a stage's configuration that cannot change a result. All others are part of the id.
NON_SEMANTIC = (
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.profiler",
    "trainer.logger",
    "data.init_args.num_workers",
    "data.init_args.pin_memory",
    "data.init_args.persistent_workers",
)
# Keys that name models and data. A hub id enters as text.
_INPUTS = re.compile(r".*_path|source|preferences")
# The path of a class, or module:function.
_NAMED = re.compile(r"(?P<module>[A-Za-z_]\w*(\.\w+)*)[.:]\w+")
# Packages whose version can change floating-point results.
NUMERICS = ("torch", "lightning", "transformers", "tokenizers", "numpy")


def read_config(path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a stage's configuration file, with its references to other keys resolved.

    Those to the environment are read where the cell runs, so that no file has their values.

    Raises:
        ConfigurationError: If the file is missing, is not a YAML mapping, or has no canonical form.
    """
    try:
        loaded = OmegaConf.load(path)
        for key, value in overrides.items():
            OmegaConf.update(loaded, spelled_key(OmegaConf.to_container(loaded), key), value)
        container = OmegaConf.to_container(loaded)
        if not isinstance(container, dict):
            raise ValueError("a mapping is expected")
        content = resolved_without_environment(container)
        digest(content)
    except (OSError, YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    return content  # `digest` refuses keys that are not strings


def as_hashed(values: Any, config: Any) -> Any:
    """A configuration with hashes of the values that `config` reads from the environment.

    Example:
        >>> [*as_hashed({"rate": "0.1", "steps": 3}, {"rate": "${oc.env:RATE}", "steps": 3})["rate"]]
        ['sha256']
    """
    if isinstance(values, Mapping) and isinstance(config, Mapping):
        return {key: as_hashed(value, config.get(key)) for key, value in values.items()}
    if isinstance(values, list) and isinstance(config, list):
        return [as_hashed(value, part) for value, part in zip(values, config, strict=False)]
    # A file is a hash already
    is_value = not isinstance(values, Mapping) and isinstance(config, str) and environment_names(config)
    return {"sha256": digest(values)} if is_value else values


def spelled_key(config: Any, key: str) -> str:
    """A key of a plan with `init_args` behind each class of a configuration that it leads through.

    Example:
        >>> model = {"class_path": "RLOOModule", "init_args": {"learning_rate": 0.1}}
        >>> spelled_key({"model": model, "kl": {"estimator": "MC"}}, "model.learning_rate")
        'model.init_args.learning_rate'
    """
    node, spelled = config, list[str]()
    for part in key.split("."):
        is_class = isinstance(node, Mapping) and ("class_path" in node or "init_args" in node)
        if is_class and part not in ("class_path", "init_args", "dict_kwargs"):
            spelled.append("init_args")
            node = node.get("init_args")
        spelled.append(part)
        node = node.get(part) if isinstance(node, Mapping) else None
    return ".".join(spelled)


def semantic(config: Mapping[str, Any], replaced: Iterable[str] = ()) -> dict[str, Any]:
    """`config` without the keys that cannot change a result.

    Example:
        >>> semantic({"trainer": {"max_steps": 5, "enable_progress_bar": False}})
        {'trainer': {'max_steps': 5}}
    """
    kept = deepcopy(dict(config))
    for key in (*NON_SEMANTIC, *(spelled_key(config, key) for key in replaced)):
        *parents, leaf = key.split(".")
        node: Any = kept
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(leaf, None)
    return kept


def with_contents(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the paths of local models and data replaced by hashes of their content.

    Example:
        >>> with_contents({"data": {"source": "stanfordnlp/imdb"}, "seed": 1})
        {'data': {'source': 'stanfordnlp/imdb'}, 'seed': 1}
    """

    def replaced(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return with_contents(value)
        named = isinstance(value, str) and names_input(key) and Path(value).exists()
        return {"sha256": content_hash(Path(value))} if named else value

    return {key: replaced(key, value) for key, value in config.items()}


def names_input(key: str) -> bool:
    """Whether a configuration key names a model or data, whose content is hashed if it is a local path."""
    return _INPUTS.fullmatch(key.rpartition(".")[2]) is not None


def environment(
    module: str, threads: int, commands: Iterable[str] = ("fit",), configs: Any = ()
) -> dict[str, str | int]:
    """What affects results beside the configuration: code, versions, number of threads.

    Raises:
        ConfigurationError: If `module` is not installed.
    """
    if package_root(module.partition(".")[0]) is None:
        raise ConfigurationError(
            f"module: {module!r} is not installed; a package with a `fit` command is expected"
        )
    # Without the module that dispatches commands, if the package is built as ours
    entries = [f"{module}.cli.{'lightning' if command == 'fit' else command}" for command in commands]
    if not all(name in import_closure([name]) for name in entries):
        entries = [module, f"{module}.__main__"]
    code = code_hash(*entries, *sorted(_own_classes(configs)))
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {name: version(name) for name in NUMERICS}
    return {"code": code, "python": python, "threads": threads, **versions}


def _own_classes(value: Any) -> Iterator[str]:
    """Modules below the working directory that hold the classes and functions that settings name."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _own_classes(item)
    elif isinstance(value, str) and (named := _NAMED.fullmatch(value)):
        root = package_root(named["module"].partition(".")[0])
        if root is not None and root.is_relative_to(Path.cwd()) and "site-packages" not in root.parts:
            yield named["module"]


def code_hash(*modules: str) -> str:
    """Hash of the sources of modules and of all they import, without comments, layout and docstrings.

    The data files of a package count if one of its modules does.
    """
    sources = import_closure(modules)
    hashes = {name: _source_hash(path) for name, path in sources.items()}
    packages = {path.parent for path in sources.values() if (path.parent / "__init__.py").exists()}
    for package in packages:
        hashes |= {f"{package.name}/{path.name}": _source_hash(path) for path in _data_files(package)}
    return digest(hashes)


def _data_files(folder: Path) -> Iterator[Path]:
    """The files of a package that are not Python's, also in folders that are not packages themselves."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".py":
            yield path
        elif path.is_dir() and path.name != "__pycache__" and not (path / "__init__.py").exists():
            yield from _data_files(path)


def _source_hash(path: Path) -> str:
    content = path.read_bytes()
    return parsed(content)[0] if path.suffix == ".py" else hashlib.sha256(content).hexdigest()
