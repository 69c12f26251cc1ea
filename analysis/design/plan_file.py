"""Reads and checks a plan file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from analysis.design.fingerprint import read_config
from analysis.results import Block, Plan, Stage
from analysis.results.rules import check_plan, require
from analysis.results.store import error_lines
from lit_klrb.config_files import check_config_file
from lit_klrb.errors import ConfigurationError

# The configuration key of a stage's corpus.
SOURCE = "data.init_args.source"
# The part of a key below which a class has its arguments.
_ARGUMENTS = "init_args"
Checked = TypeVar("Checked")
Part = TypeVar("Part", Stage, Block)


def read_plan(path: Path) -> Plan:
    """Read and check a plan file.

    Its name is that of the file and its directory runs/NAME unless it says otherwise. Configuration keys are
    spelled as the stages' configurations are, see `spelled_out`.

    Raises:
        ConfigurationError: If the file or a value in it is not allowed; one line with key and value.
    """

    def completed(**content: Any) -> Plan:
        name = content.get("name", path.stem)
        return Plan(**{"name": name, "directory": f"runs/{name}", **content})

    def check(plan: Plan) -> Plan:
        check_plan(plan)
        plan = spelled_out(plan)
        check_plan(plan)
        return plan

    return read_checked(path, completed, check, "a plan", Plan)


def spelled_out(plan: Plan) -> Plan:
    """The plan with `init_args` in configuration keys where the configurations of its stages have a class.

    On the command line they may be left out, so both spellings of a key are one, and the ids of cells must
    not depend on it. A stage whose configuration is missing is left as it is.

    Raises:
        ConfigurationError: If a key is given in both spellings.
    """
    stages, config = dict(plan.stages), {}
    for name, stage in plan.stages.items():
        config = read_config(stage.config, {}) if Path(stage.config).is_file() else {}
        if config:
            stages[name] = _spelled_part(config, stage, f"stages.{name}")
            config = read_config(stage.config, stages[name].overrides)
    if not config:  # that of the last stage, to which the grid applies
        return replace(plan, stages=stages)
    grid = plan.grid
    arms = {label: _spelled(config, arm, f"grid.arms.{label}") for label, arm in grid.arms.items()}
    blocks = {
        label: _spelled_part(config, block, f"grid.blocks.{label}") for label, block in grid.blocks.items()
    }
    tuning = plan.tuning and replace(plan.tuning, key=spelled_key(config, plan.tuning.key))
    return replace(plan, stages=stages, grid=replace(grid, arms=arms, blocks=blocks), tuning=tuning)


def _spelled_part(config: Mapping[str, Any], part: Part, where: str) -> Part:
    overrides = _spelled(config, part.overrides, f"{where}.overrides")
    return replace(part, overrides=overrides, inputs=_spelled(config, part.inputs, f"{where}.inputs"))


def spelled_key(config: Mapping[str, Any], key: str) -> str:
    """A configuration key with `init_args` behind each class of a configuration.

    Below what the configuration only names, or does not have, they are left out.

    Example:
        >>> model = {"class_path": "RLOOModule", "init_args": {"learning_rate": 0.1}}
        >>> spelled_key({"model": model, "kl": {"estimator": "MC"}}, "model.learning_rate")
        'model.init_args.learning_rate'
        >>> spelled_key({"kl": {"estimator": "MC"}}, "kl.estimator.init_args.discount")
        'kl.estimator.discount'
    """
    node: Any = config
    found: list[str] = []
    for part in key.split("."):
        is_class = isinstance(node, Mapping) and "class_path" in node
        if part == _ARGUMENTS and not is_class and not isinstance(node, Mapping):
            continue
        if is_class and part not in (_ARGUMENTS, "class_path", "dict_kwargs"):
            found.append(_ARGUMENTS)
            node = node.get(_ARGUMENTS)
        found.append(part)
        node = node.get(part) if isinstance(node, Mapping) else None
    return ".".join(found)


def _spelled(config: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        spelled = spelled_key(config, key)
        require(spelled not in found, f"{where}.{key}", value, f"another key: {spelled} is given, too")
        found[spelled] = value
    return found


def with_source(plan: Plan, source: str) -> Plan:
    """The plan with another corpus for all stages, under a name and a directory of its own.

    Name and setting stand beside the verdict in a report, and would otherwise speak of the plan's own data.
    """
    name = Path(source).stem
    stages = {
        key: replace(stage, overrides={**stage.overrides, SOURCE: source}) if stage.trains else stage
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
    made: Callable[..., Checked],
    check: Callable[[Checked], Checked],
    called: str,
    kind: type[Checked],
) -> Checked:
    """Read a YAML file as a type.

    Raises:
        ConfigurationError: If the file or a value in it is not allowed; one line with key and value.
    """
    try:
        check_config_file(path)
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ConfigurationError(f"a mapping with the keys of {called} is expected")
        content = OmegaConf.to_container(loaded, resolve=True, throw_on_missing=True)
        assert isinstance(content, dict)
        return check(made(**{str(key): value for key, value in content.items()}))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; the path of {called} is expected") from None
    except OmegaConfBaseException as error:
        reason, key = str(error).partition("\n")[0], f"{error.full_key}: " if error.full_key else ""
        raise ConfigurationError(f"{path}: {key}{reason}") from None
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {error_lines(error, kind)[0]}") from None
    except YAMLError as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    except ConfigurationError as error:
        named = str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
        raise ConfigurationError(named) from None
