"""Reads and checks a plan file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from analysis.results import Plan
from analysis.results.keys import flat
from analysis.results.rules import check_plan
from analysis.results.store import error_lines
from lit_klrb.config_files import check_config_file
from lit_klrb.errors import ConfigurationError
from lit_klrb.redaction import environment_names, resolved_with_environment, resolved_without_environment

Checked = TypeVar("Checked")
DIRECTORY = "directory"


def read_plan(path: Path) -> Plan:
    """Read and check a plan file.

    Its name is that of the file and its directory runs/NAME unless it says otherwise.

    Raises:
        ConfigurationError: If the file or a value in it is not allowed; one line with key and value.
    """

    def completed(**content: Any) -> Plan:
        name = content.get("name", path.stem)
        return Plan(**{"name": name, "directory": f"runs/{name}", **content})

    return read_checked(path, completed, check_plan, "a plan", Plan, interpolated=True)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a plan file, for editors and programs; it says less than `read_plan` checks.

    Example:
        >>> json_schema()["required"]
        ['stages', 'grid', 'primary']
    """
    schema = TypeAdapter(Plan).json_schema()
    # Name and directory have defaults from the file's name
    required = [key for key in schema["required"] if key not in ("name", DIRECTORY)]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "required": required}


def read_checked(
    path: Path,
    made: Callable[..., Checked],
    check: Callable[[Checked], None],
    called: str,
    of_type: type[Checked],
    *,
    interpolated: bool = False,
) -> Checked:
    """Read a YAML file as a type.

    Args:
        path: The file.
        made: Makes the type from the content.
        check: Checks what the type does not say.
        called: What the file is called.
        of_type: The type.
        interpolated: Whether `${...}` refers to other keys and, in `directory`, to the environment; in what
            may be a stranger's file it is text.

    Raises:
        ConfigurationError: If the file or a value in it is not allowed; one line with key and value.
    """
    try:
        check_config_file(path)
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ConfigurationError(f"a mapping with the keys of {called} is expected")
        content = OmegaConf.to_container(loaded, throw_on_missing=True)
        assert isinstance(content, dict)
        if interpolated:
            content = _interpolated(content)
        document = made(**{str(key): value for key, value in content.items()})
        check(document)
        return document
    except OmegaConfBaseException as error:
        reason, key = str(error).partition("\n")[0], f"{error.full_key}: " if error.full_key else ""
        raise ConfigurationError(f"{path}: {key}{reason}") from None
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {error_lines(error, of_type)[0]}") from None
    except ConfigurationError as error:
        named = str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
        raise ConfigurationError(named) from None


def _interpolated(content: dict[Any, Any]) -> dict[Any, Any]:
    """The content of a plan with `${...}` resolved, but nothing of the environment in what is published."""
    config = resolved_without_environment(content)
    for key, value in flat(config):
        if key != DIRECTORY and environment_names(value):
            text = f"{value} is read in configurations and in `{DIRECTORY}` only, as plans are published"
            raise ConfigurationError(text, key=key)
    return resolved_with_environment(config)
