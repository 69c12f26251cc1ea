"""Checks of single values of a plan, and of its grid."""

import math
from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any

from analysis.results.cell import ESTIMATOR
from analysis.results.grid import BETA, SEED, Grid, by_beta, is_plain_data, plain_key
from analysis.results.stage import Stage
from lit_klrb.errors import ConfigurationError

# Keys of the command line that no arm may set, and why.
RESERVED = {
    SEED: "seeds follow from root_seed",
    BETA: "grid.beta sets it",
    "config": "the stage names it",
    "ckpt_path": "every cell starts afresh",
    "trainer.default_root_dir": "every cell has its own",
}
# Maximum number of runs of a grid, against typing errors.
_MOST_RUNS = 1_000_000
# Maximum number of characters of a name, which stands beside every number.
_LONGEST = 200


def require(holds: bool, key: str, value: object, allowed: str) -> None:
    """Raise an error with the key, its value and what is allowed, unless a condition holds."""
    if not holds:
        raise ConfigurationError(f"{value!r} is not allowed; {allowed}", key=key)


def one_of(key: str, value: str, allowed: Collection[str]) -> None:
    """Require that a value is one of those allowed."""
    require(value in allowed, key, value, f"one of: {', '.join(allowed)}")


def require_short(key: str, name: str) -> None:
    """Require that a name is not too long."""
    allowed = f"names have at most {_LONGEST} characters, got {len(name)}"
    require(len(name) <= _LONGEST, key, f"{name[:20]}...", allowed)


def check_grid(grid: Grid, stages: Mapping[str, Stage]) -> None:
    """Check the conditions on a grid that types do not express.

    Args:
        grid: The grid.
        stages: The stages of the plan, of which the grid is that of the last.

    Raises:
        ConfigurationError: If a value is not allowed; one line naming key and value.
    """
    last = list(stages)[-1]
    _check_arms(grid, dict.fromkeys(map(plain_key, stages[last].inputs), f"stages.{last}.inputs sets it"))
    betas, replicates = grid.beta, grid.replicates
    require(bool(betas), "grid.beta", betas, "at least one weight is expected")
    for index, beta in betas.items():
        require(index >= 0, "grid.beta", index, "indices are integers >= 0")
        require(math.isfinite(beta) and beta >= 0, f"grid.beta.{index}", beta, "finite numbers >= 0")
        same = [other for other in betas if betas[other] == beta and other != index]
        require(not same, f"grid.beta.{index}", beta, f"another weight than grid.beta.{(same or [0])[0]}")
    most = _MOST_RUNS // (len(grid.arms) * len(betas))
    allowed = f"integers from 1 to {most} (a million runs)"
    require(type(replicates) is int and 1 <= replicates <= most, "grid.replicates", replicates, allowed)
    check_multiple(grid, "grid.replicates", replicates)
    _check_blocks(grid, last, stages)


def check_multiple(grid: Grid, key: str, replicates: int) -> None:
    """Require that all blocks have the same number of replicates."""
    blocks = len(grid.blocks)
    allowed = f"a multiple of {blocks}, the number of blocks"
    require(not blocks or replicates % blocks == 0, key, replicates, allowed)


def _check_arms(grid: Grid, inputs: Mapping[str, str]) -> None:
    require(bool(grid.arms), "grid.arms", grid.arms, "at least one arm is expected")
    for label, overrides in grid.arms.items():
        _check_label("grid.arms", label)
        for key, value in overrides.items():
            place = f"grid.arms.{label}.{key}"
            _check_override(place, key, value, RESERVED | dict(inputs))
            _check_by_beta(grid, place, key, value)
    for (one, ours), (other, theirs) in combinations(grid.arms.items(), 2):
        require(ours != theirs, f"grid.arms.{other}", theirs, f"{one} is the same")


def _check_label(key: str, label: str) -> None:
    named = bool(label) and label.isprintable() and label.strip() == label
    require(named, key, label, "labels are printable and have no blanks around them")
    require_short(key, label)


def _check_override(place: str, key: str, value: Any, taken: Mapping[str, str]) -> None:
    """Check a value, and that nothing else sets its key.

    Args:
        place: The key in the plan.
        key: The configuration key.
        value: Its value.
        taken: Plain key -> what sets it.
    """
    require(plain_key(key) not in taken, place, value, taken.get(plain_key(key), ""))
    require(is_plain_data(value), place, value, "plain values, lists and mappings are expected")


def _check_by_beta(grid: Grid, place: str, key: str, value: Any) -> None:
    values = by_beta(value)
    if values is None:
        return
    indices = [str(index) for index in grid.beta]
    require(set(values) == {*indices}, place, value, f"a value for each of {', '.join(indices)}")
    estimator = plain_key(key) == ESTIMATOR or plain_key(key).startswith(f"{ESTIMATOR}.")
    require(not estimator, place, value, "an arm has the same estimator at every beta")


def _check_blocks(grid: Grid, last: str, stages: Mapping[str, Stage]) -> None:
    blocks, stage = grid.blocks, stages[last]
    require(len(blocks) != 1, "grid.blocks", list(blocks), "at least two blocks are expected, or none")
    arms = {plain_key(key): f"grid.arms.{arm} sets it" for arm in grid.arms for key in grid.arms[arm]}
    for label, block in blocks.items():
        _check_label("grid.blocks", label)
        place = f"grid.blocks.{label}"
        above = [name for name in stages if name != last and stages[name].trains]
        set_there = dict.fromkeys(map(plain_key, stage.overrides), f"stages.{last}.overrides sets it")
        for key, source in block.inputs.items():
            one_of(f"{place}.inputs.{key}", source, above)
            _check_override(f"{place}.inputs.{key}", key, source, RESERVED | arms | set_there)
        inputs = dict.fromkeys(map(plain_key, {**stage.inputs, **block.inputs}), "an input sets it")
        for key, value in block.overrides.items():
            at_each = "only the values of an arm can differ between betas"
            require(by_beta(value) is None, f"{place}.overrides.{key}", value, at_each)
            _check_override(f"{place}.overrides.{key}", key, value, RESERVED | arms | inputs)
    for (one, ours), (other, theirs) in combinations(blocks.items(), 2):
        require(ours != theirs, "grid.blocks", [one, other], "two blocks differ")
