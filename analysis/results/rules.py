"""What the types of a plan do not say: what excludes what, and which names must exist."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from itertools import combinations
from typing import Any

from analysis.results.keys import BETA, ESTIMATOR, SEED, by_beta
from analysis.results.plan import TUNING, Grid, Plan, Stage, Tuning
from analysis.results.store import canonical
from lit_klrb.errors import ConfigurationError

# Keys of the command line that no arm may set, and why.
RESERVED = {
    SEED: "seeds follow from root_seed",
    BETA: "grid.beta sets it",
    "config": "the stage names it",
    "ckpt_path": "every cell starts afresh",
    "trainer.default_root_dir": "every cell has its own",
}


def require(holds: bool, key: str, value: object, allowed: str) -> None:
    """Raise an error with the key, its value and what is allowed, unless a condition holds."""
    if not holds:
        raise ConfigurationError(f"{value!r} is not allowed; {allowed}", key=key)


def one_of(key: str, value: str, allowed: Collection[str]) -> None:
    """Require that a value is one of those allowed."""
    require(value in allowed, key, value, f"one of: {', '.join(allowed)}")


def check_plan(plan: Plan) -> None:
    """Check a plan beyond its types.

    Raises:
        ConfigurationError: If a value is not allowed; one line naming key and value.
    """
    grid, primary, directory = plan.grid, plan.primary, plan.directory
    _check_stages(plan.stages)
    last, stage = [*plan.stages.items()][-1]
    _check_arms(grid, dict.fromkeys(stage.inputs, f"stages.{last}.inputs sets it"))
    _check_different("grid.beta", grid.beta)
    most = 1_000_000 // (len(grid.arms) * len(grid.beta))  # against typing errors
    allowed = f"integers from 1 to {most} (a million runs)"
    require(1 <= grid.replicates <= most, "grid.replicates", grid.replicates, allowed)
    _check_multiple(grid, "grid.replicates", grid.replicates)
    require(len(grid.blocks) != 1, "grid.blocks", [*grid.blocks], "at least two blocks are expected, or none")
    _check_different("grid.blocks", {label: asdict(block) for label, block in grid.blocks.items()})
    for label in grid.blocks:
        _check_block(plan, label)
    one_of("primary.control", primary.control, grid.arms)
    outcomes = ("kl",) if primary.outcome == "kl" else ("objective", "matched_kl")
    for outcome in primary.margins:
        one_of("primary.margins", outcome, outcomes)
    if plan.tuning is not None:
        _check_tuning(plan, plan.tuning)
    usable = "\0" not in directory and "://" not in directory and bool(directory.strip())
    require(usable, "directory", directory, "the path of a directory of this machine")


def _check_stages(stages: Mapping[str, Stage]) -> None:
    require(bool(stages), "stages", stages, "at least one stage is expected")
    earlier: list[str] = []
    for name, stage in stages.items():
        for key, source in stage.inputs.items():
            above = f"a stage above: {', '.join(earlier) or 'there is none'}"
            require(source in earlier, f"stages.{name}.inputs.{key}", source, above)
        inputs = dict.fromkeys(stage.inputs, f"stages.{name}.inputs already sets it")
        for key, value in stage.overrides.items():
            _check_override(f"stages.{name}.overrides.{key}", key, value, inputs)
        if stage.trains:
            earlier.append(name)
        else:
            require(not stage.inputs, f"stages.{name}.inputs", stage.inputs, "a study takes no checkpoint")
            grid = "a study cannot be the last stage, to which the grid applies"
            require(name != [*stages][-1], f"stages.{name}.command", stage.command, grid)


def _check_multiple(grid: Grid, key: str, replicates: int) -> None:
    """Require that all blocks have the same number of replicates."""
    blocks = len(grid.blocks)
    allowed = f"a multiple of {blocks}, the number of blocks"
    require(not blocks or replicates % blocks == 0, key, replicates, allowed)


def _check_different(key: str, items: Mapping[Any, object]) -> None:
    """Require at least one item, and that no two are equal; blocks are optional."""
    require(bool(items) or key == "grid.blocks", key, items, "at least one is expected")
    for (one, first), (other, second) in combinations(items.items(), 2):
        require(first != second, f"{key}.{other}", second, f"{one} is the same")


def _check_arms(grid: Grid, inputs: Mapping[str, str]) -> None:
    _check_different("grid.arms", grid.arms)
    indices = [str(index) for index in grid.beta]
    for label, overrides in grid.arms.items():
        for key, value in overrides.items():
            setting = f"grid.arms.{label}.{key}"
            _check_override(setting, key, value, {**RESERVED, **inputs})
            if (values := by_beta(value)) is not None:
                require({*values} == {*indices}, setting, value, f"a value for each of {', '.join(indices)}")
                estimator = f"{key}.".startswith(f"{ESTIMATOR}.")
                require(not estimator, setting, value, "an arm has the same estimator at every beta")


def _check_override(setting: str, key: str, value: Any, taken: Mapping[str, str]) -> None:
    """Check the value of a configuration key, and that nothing else sets it: `taken` is key -> what does."""
    require(key not in taken, setting, value, taken.get(key, ""))
    try:
        canonical(value)
    except ValueError:
        require(False, setting, value, "plain values, lists and mappings are expected")


def _check_block(plan: Plan, label: str) -> None:
    grid, block, setting = plan.grid, plan.grid.blocks[label], f"grid.blocks.{label}"
    last, stage = [*plan.stages.items()][-1]
    above = [name for name in plan.stages if name != last and plan.stages[name].trains]
    arms = {key: f"grid.arms.{arm} sets it" for arm in grid.arms for key in grid.arms[arm]}
    set_there = dict.fromkeys(stage.overrides, f"stages.{last}.overrides sets it")
    for key, source in block.inputs.items():
        one_of(f"{setting}.inputs.{key}", source, above)
        _check_override(f"{setting}.inputs.{key}", key, source, RESERVED | arms | set_there)
    inputs = dict.fromkeys({**stage.inputs, **block.inputs}, "an input sets it")
    for key, value in block.overrides.items():
        at_each = "only the values of an arm can differ between betas"
        require(by_beta(value) is None, f"{setting}.overrides.{key}", value, at_each)
        _check_override(f"{setting}.overrides.{key}", key, value, RESERVED | arms | inputs)


def _check_tuning(plan: Plan, tuning: Tuning) -> None:
    require(len({*tuning.rates}) == len(tuning.rates), "tuning.rates", tuning.rates, "different rates")
    _check_multiple(plan.grid, "tuning.replicates", tuning.replicates)
    require(TUNING not in plan.stages, f"stages.{TUNING}", TUNING, "a plan with tuning has this stage")
    require(tuning.key not in RESERVED, "tuning.key", tuning.key, RESERVED.get(tuning.key, ""))
    changed = {f"grid.arms.{label}": overrides for label, overrides in plan.grid.arms.items()}
    blocks = plan.grid.blocks.items()
    changed |= {f"grid.blocks.{label}.overrides": block.overrides for label, block in blocks}
    for setting, overrides in changed.items():
        for name, value in overrides.items():
            require(name != tuning.key, f"{setting}.{name}", value, "tuning chooses it")
