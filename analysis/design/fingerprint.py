"""Hashes of everything that the result of a cell depends on.

Cells have the same id if and only if their results must be equal. The id depends on the resolved
configuration of the stage, the overrides, the ids of the cells from whose checkpoints it starts, the code,
and the versions of packages that affect floating-point results. It does not depend on the location of files
or the display of progress; local models and data sets enter with their content.
"""

import hashlib
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from analysis.design.closure import import_closure, package_root, parsed
from analysis.design.contents import content_hash
from analysis.results.store import digest
from lit_klrb.errors import ConfigurationError

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
    """The content of a stage's configuration file with interpolations resolved.

    Raises:
        ConfigurationError: If the file is missing, is not a YAML mapping, or has no canonical form.
    """
    try:
        loaded = OmegaConf.load(path)
        for key, value in overrides.items():
            OmegaConf.update(loaded, key, value)
        content = OmegaConf.to_container(loaded, resolve=True)
        if not isinstance(content, dict):
            raise ValueError("a mapping is expected")
        digest(content)
    except (OSError, YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    return content  # type: ignore[return-value]  # `digest` refuses keys that are not strings


def semantic(config: Mapping[str, Any], replaced: Iterable[str] = ()) -> dict[str, Any]:
    """`config` without the keys that cannot change a result.

    Example:
        >>> semantic({"trainer": {"max_steps": 5, "enable_progress_bar": False}})
        {'trainer': {'max_steps': 5}}
    """
    kept = deepcopy(dict(config))
    for key in (*NON_SEMANTIC, *replaced):
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
        named = isinstance(value, str) and _INPUTS.fullmatch(key.rpartition(".")[2]) is not None
        return {"sha256": content_hash(Path(value))} if named and Path(value).exists() else value

    return {key: replaced(key, value) for key, value in config.items()}


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
    code = code_hash(*_entries(module, commands), *sorted(_own_classes(configs)))
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {name: version(name) for name in NUMERICS}
    return {"code": code, "python": python, "threads": threads, **versions}


def _entries(module: str, commands: Iterable[str]) -> list[str]:
    """The modules that run commands, without the one that dispatches them if the package is built as ours."""
    own = [f"{module}.cli.{'lightning' if command == 'fit' else command}" for command in commands]
    return own if all(name in import_closure([name]) for name in own) else [module, f"{module}.__main__"]


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
    return parsed(content).hash if path.suffix == ".py" else hashlib.sha256(content).hexdigest()
