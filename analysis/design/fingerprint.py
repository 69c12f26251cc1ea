"""Hashes of everything that the result of a cell depends on.

Cells have the same id if and only if their results must be equal. The id depends on the resolved
configuration of the stage, the overrides, the ids of the cells from whose checkpoints it starts, the code,
and the versions of packages that affect floating-point results. It does not depend on the location of files
or the display of progress; local models and data sets enter with their content.
"""

import ast
import hashlib
import platform
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from analysis.design.contents import content_hash
from analysis.results.checksum import digest
from lit_klrb.errors import ConfigurationError

# Keys of a stage's configuration that cannot change a result. All others are part of the id.
NON_SEMANTIC = (
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.profiler",
    "data.init_args.num_workers",
    "data.init_args.pin_memory",
    "data.init_args.persistent_workers",
)
# Keys that name models and data. A hub id enters as text.
_INPUTS = re.compile(r".*_path|source|preferences")
# Packages whose version can change floating-point results.
NUMERICS = ("torch", "lightning", "transformers", "tokenizers", "numpy")


def read_config(path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a stage's configuration file with interpolations resolved.

    Args:
        path: The file.
        overrides: Values that replace those of the file, by dotted key.

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

    Args:
        config: The resolved configuration of a stage.
        replaced: Dotted keys whose values are replaced on the command line.

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


def environment(module: str, threads: int) -> dict[str, str | int]:
    """What affects results beside the configuration: code, versions, number of threads.

    Args:
        module: The package or module that runs a cell.
        threads: Number of threads of a cell, which can change the order of summation.
    """
    versions = {name: version(name) for name in NUMERICS}
    return {"code": code_hash(module), "python": _python_minor(), "threads": threads, **versions}


def _python_minor() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def code_hash(module: str) -> str:
    """Hash of the sources of `module` without comments, layout and docstrings."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            f"module: {module!r} is not installed; a package with a `fit` command is expected"
        )
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return digest({origin.name: _source_hash(origin)})
    files = (path for path in origin.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return digest({path.relative_to(origin.parent).as_posix(): _source_hash(path) for path in files})


def _source_hash(path: Path) -> str:
    source = path.read_bytes()
    if path.suffix == ".py":
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                ast.get_docstring(node, clean=False) is not None
            ):
                node.body = node.body[1:]
        source = ast.dump(tree).encode()
    return hashlib.sha256(source).hexdigest()
