"""Reads and checks a plan file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from analysis.results import Plan
from analysis.results.checks import require
from analysis.results.grid import arms_of_estimators
from analysis.results.stage import FIT
from lit_klrb.config_files import check_config_file
from lit_klrb.errors import ConfigurationError

# The configuration key of a stage's corpus.
SOURCE = "data.init_args.source"
Checked = TypeVar("Checked")


def read_plan(path: Path) -> Plan:
    """Read and check a plan file.

    Raises:
        ConfigurationError: If the file or a value in it is not allowed; one line with key and value.
    """

    def spell_out(content: DictConfig) -> None:
        _check_indices(content)
        _spell_out_arms(content)

    return read_checked(path, Plan, Plan.check, "a plan", spell_out)


def with_source(plan: Plan, source: str) -> Plan:
    """The plan with another corpus for all stages, under a name and a directory of its own.

    Name and setting stand beside the verdict in a report, and would otherwise speak of the plan's own data.

    Args:
        plan: The plan.
        source: The value of `data.init_args.source`.
    """
    name = Path(source).stem
    stages = {
        key: replace(stage, overrides={**stage.overrides, SOURCE: source}) if stage.command == FIT else stage
        for key, stage in plan.stages.items()
    }
    return replace(
        plan,
        name=f"{plan.name} on {name}",
        setting=f"on {name}, in place of the data of the plan {plan.name}: {plan.setting}".removesuffix(": "),
        directory=f"{plan.directory}-{name}",
        stages=stages,
    )


def smallest_p(swaps: int) -> float:
    """The smallest two-sided p-value that an exact swap test can attain.

    Under exchangeability each unit can be swapped independently, so 2**swaps outcomes are equally likely. The
    p-value is at least the probability of the most extreme one and its mirror image.

    Args:
        swaps: Number of swap units: pairs, or whole replicates if seeds are shared across betas.

    Example:
        >>> smallest_p(5), smallest_p(6)
        (0.0625, 0.03125)
    """
    return min(1.0, 2.0 ** (1 - swaps))


def read_checked(
    path: Path,
    kind: type[Checked],
    check: Callable[[Checked], None],
    called: str,
    prepare: Callable[[DictConfig], None] = lambda content: None,
) -> Checked:
    """Read a YAML file as a data class.

    Args:
        path: The file.
        kind: The class.
        check: Checks the values beyond their types.
        called: The expected content of the file, for messages.
        prepare: Expands abbreviations before the types are checked.

    Raises:
        ConfigurationError: If the file or a value in it is not allowed; one line with key and value.
    """
    try:
        check_config_file(path)
        content = OmegaConf.load(path)
        if not isinstance(content, DictConfig):
            raise ConfigurationError(f"a mapping with the keys of {called} is expected")
        prepare(content)
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), content))
        assert isinstance(found, kind)
        check(found)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; the path of {called} is expected") from None
    except OmegaConfBaseException as error:
        reason, key = str(error).partition("\n")[0], f"{error.full_key}: " if error.full_key else ""
        raise ConfigurationError(f"{path}: {key}{reason}") from None
    except (YAMLError, TypeError) as error:  # a list where a mapping is expected, or the other way round
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    except ConfigurationError as error:
        named = str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
        raise ConfigurationError(named) from None
    return found


def _check_indices(content: DictConfig) -> None:
    beta = OmegaConf.select(content, "grid.beta")
    if isinstance(beta, ListConfig):
        indexed = ", ".join(f"{index}: {value}" for index, value in enumerate(beta))
        raise ConfigurationError(
            f"a list is not allowed, give each weight a lasting index: {{{indexed}}}", key="grid.beta"
        )
    if isinstance(OmegaConf.select(content, "grid.blocks"), ListConfig):
        raise ConfigurationError("a list is not allowed, give each block a label", key="grid.blocks")


def _spell_out_arms(content: DictConfig) -> None:
    """Replace a list of estimators, under grid.arms or grid.estimator, by the corresponding arms."""
    grid = content.get("grid")
    if not isinstance(grid, DictConfig):
        return
    if "arms" in grid and "estimator" in grid:
        raise ConfigurationError("arms and estimator are both given; one of them is expected", key="grid")
    key = "estimator" if "estimator" in grid else "arms"
    names = grid.get(key)
    if key == "estimator" or isinstance(names, ListConfig):
        listed = isinstance(names, ListConfig) and all(isinstance(name, str) for name in names)
        require(listed, f"grid.{key}", names, "a list of names")
        require(len(set(names)) == len(names), f"grid.{key}", list(names), "different names")
        del grid[key]
        grid.arms = arms_of_estimators(list(names))
