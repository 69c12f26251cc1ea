"""Reads a plan file: YAML in, a checked `Plan` out."""

from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from analysis.results import Plan
from lit_klrb.errors import ConfigurationError


def read_plan(path: Path) -> Plan:
    """Read and check a plan file.

    Raises:
        ConfigurationError: If the file or a value in it is not allowed; one line naming key and value.
    """
    try:
        content = OmegaConf.load(path)
        if not isinstance(content, DictConfig):
            raise ConfigurationError("a mapping with the keys of a plan is expected")
        beta = OmegaConf.select(content, "grid.beta")
        if isinstance(beta, ListConfig):
            indexed = ", ".join(f"{index}: {value}" for index, value in enumerate(beta))
            raise ConfigurationError(
                f"a list is not allowed, give each weight a lasting index: {{{indexed}}}", key="grid.beta"
            )
        plan = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Plan), content))
        assert isinstance(plan, Plan)
        plan.check()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; the path of a plan file is expected") from None
    except YAMLError as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{path}: {_one_line(error)}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return plan


def _one_line(error: OmegaConfBaseException) -> str:
    reason = str(error).partition("\n")[0]
    return f"{error.full_key}: {reason}" if error.full_key else reason
