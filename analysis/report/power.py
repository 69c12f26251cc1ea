"""Power of a planned sweep, by simulation: from a pilot's spreads, or from stated assumptions."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from analysis.results import Plan
from analysis.results.load import load_sweep
from analysis.stats.matching import match
from analysis.stats.power import SWEEPS, rejection_rates, replicates_needed
from analysis.stats.scenario import STANDARD, Scenario, scenario_of
from analysis.stats.text import number
from lit_klrb.errors import ConfigurationError

# True advantages in reward, in units of its spread between replicates.
LIFTS = (0.25, 0.5, 1.0)


def power(plan: Plan, pilot: Path | None) -> list[str]:
    """Lines for `analysis plan`: type-I error, power, and the replicates that would do.

    Args:
        plan: Gives replicates and level; a treatment is compared with the control at Holm's first step.
        pilot: The directory of an earlier sweep with the plan's control and one of its other estimators.

    Raises:
        ConfigurationError: If the pilot has no such sweep, or too few runs to tell a spread.
    """
    scenario, source = (_assumed(plan), "assumed, no pilot") if pilot is None else _measured(plan, pilot)
    scenario = replace(scenario, replicates=plan.grid.replicates)
    return [
        f"power ({source}: reward spread {number(scenario.reward_sd)} between replicates at given KL, "
        f"log KL {number(scenario.log_kl_sd)}, correlation within a pair {number(scenario.correlation, 2)}; "
        f"{len(scenario.betas)} betas x {scenario.replicates} replicates; level {plan.level:.2g}; "
        f"{SWEEPS:,} simulated sweeps)",
        *_rates(plan, scenario),
    ]


def _rates(plan: Plan, scenario: Scenario) -> Iterator[str]:
    size = rejection_rates(scenario, alpha=plan.level)["objective"]
    yield f"  no difference: the test of J rejects {size}"
    for lift in LIFTS:
        found = rejection_rates(scenario, lift=lift, alpha=plan.level)["objective"]
        enough = replicates_needed(scenario, lift, alpha=plan.level)
        needed = f"{enough} replicates" if enough else "more than 56 replicates"
        more = number(lift * scenario.reward_sd)
        yield f"  {more} more reward ({lift:g} SD): found with power {found}; 80% needs {needed}"


def _assumed(plan: Plan) -> Scenario:
    """The standard scenario at as many betas as are planned, from the middle of its six."""
    count = len(plan.grid.beta)
    chosen = [round(i * (len(STANDARD.betas) - 1) / max(1, count - 1)) for i in range(count)]
    return replace(
        STANDARD,
        betas=tuple(STANDARD.betas[i] for i in chosen),
        log_kl=tuple(STANDARD.log_kl[i] for i in chosen),
    )


def _measured(plan: Plan, pilot: Path) -> tuple[Scenario, str]:
    sweep = load_sweep(pilot)
    for name in plan.comparisons:
        scenario = scenario_of(match(sweep, name, plan.primary.control))
        if scenario is not None:
            return scenario, f"from {name} against {plan.primary.control} in {pilot}"
    raise ConfigurationError(
        f"--pilot: {pilot} has no two matched runs at each beta of {plan.primary.control} and one of "
        f"{', '.join(plan.comparisons)}"
    )
