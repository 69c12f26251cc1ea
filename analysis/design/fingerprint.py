"""What a cell's result depends on, and the hash of it.

Two cells have the same id exactly when their results must be equal: the id covers the resolved configuration
of the stage, the overrides, the ids of the cells whose checkpoints it starts from, the code and the versions
that decide how floats are summed. It does not cover where files lie or how progress is shown: a model or a
data set on this machine counts by its content.
"""

import ast
import functools
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

from analysis.results.checksum import digest
from lit_klrb.errors import ConfigurationError

# Keys of a stage's configuration that cannot change a result. All others count, known or not.
NON_SEMANTIC = (
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.profiler",
    "data.init_args.num_workers",
    "data.init_args.pin_memory",
    "data.init_args.persistent_workers",
)
# Where a configuration names models and data; a hub id counts as it is written.
_INPUTS = re.compile(r".*_path|source|preferences")
# Packages whose version can change a float.
NUMERICS = ("torch", "lightning", "transformers", "tokenizers", "numpy")


def read_config(path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a stage's configuration file with its interpolations resolved.

    Args:
        path: The file.
        overrides: Dotted key -> the value it takes instead of the file's.

    Raises:
        ConfigurationError: If the file is missing, is no YAML mapping, or has no canonical form.
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
        replaced: Dotted keys that the command line replaces, so that the file's value is never used.

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
    """`config` with the models and data it names on this machine replaced by hashes of their content.

    Example:
        >>> with_contents({"data": {"source": "stanfordnlp/imdb"}, "seed": 1})
        {'data': {'source': 'stanfordnlp/imdb'}, 'seed': 1}
    """

    def replaced(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return with_contents(value)
        named = isinstance(value, str) and _INPUTS.fullmatch(key.rpartition(".")[2]) is not None
        return {"sha256": _content_hash(Path(value))} if named and Path(value).exists() else value

    return {key: replaced(key, value) for key, value in config.items()}


def _content_hash(path: Path) -> str:
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file())
        return digest({file.relative_to(path).as_posix(): _content_hash(file) for file in files})
    status = path.stat()
    return _hash_as_it_is(path, status.st_mtime_ns, status.st_size)


@functools.cache  # hundreds of cells name the same models and data
def _hash_as_it_is(path: Path, modified: int, size: int) -> str:
    """The hash of a file's bytes; another time of change or size makes it another file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def environment(module: str, threads: int) -> dict[str, str | int]:
    """What surrounds a configuration and can change its result: code, versions, threads.

    Args:
        module: The package, or single module, that runs a cell.
        threads: Threads a cell computes with; their number can change the order of a sum.
    """
    versions = {name: version(name) for name in NUMERICS}
    return {"code": code_hash(module), "python": _python_minor(), "threads": threads, **versions}


def _python_minor() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def code_hash(module: str) -> str:
    """Hash of what the sources of `module` do: comments, layout and docstrings do not count."""
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
