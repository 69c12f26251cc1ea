"""Power of a planned sweep by simulation, from the variances of a pilot or from assumptions."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis.report.pilot import warnings
from analysis.results import Plan
from analysis.results.sweep import Sweep, load_sweep
from analysis.stats.evaluation_noise import noise_share
from analysis.stats.matching import match, matched_evaluations
from analysis.stats.pairs import Pairs
from analysis.stats.power import (
    REPLICATES,
    SWEEPS,
    detectable_difference,
    detectable_over_blocks,
    detectable_ratio,
    expected_detectable,
    primary_rate,
    replicates_needed,
)
from analysis.stats.scenario import STANDARD, Scenario, scenario_of
from analysis.stats.text import number
from lit_klrb.errors import ConfigurationError

# True differences in what decides, reward or log KL, in standard deviations between replicates.
LIFTS = (0.25, 0.5, 1.0)
_SUBJECTS = {"objective": "J", "kl": "the KL"}


def power(plan: Plan, pilot: Path | None) -> list[str]:
    """Lines for `analysis plan`: type-I error, power, replicates needed, and other designs.

    Args:
        plan: The plan; each treatment is compared with the control at the level of each comparison.
        pilot: The directory of an earlier sweep with the plan's control and one of its other arms.

    Raises:
        ConfigurationError: If the pilot has no such arms, or too few runs to estimate variances, or no
            rewards where the plan decides by J.
    """
    found = None if pilot is None else load_sweep(pilot)
    if found is not None and found.invalid:
        raise ConfigurationError(f"--pilot: {pilot} cannot be trusted: {found.invalid[0]}")
    if found is None:
        scenario, source, pairs = _assumed(plan), "assumed, no pilot", None
    else:
        scenario, pairs = _measured(plan, found)
        source = f"from {pairs.treatment} against {pairs.control} in {found.directory}"
    scenario = replace(scenario, replicates=plan.grid.replicates)
    noise = () if found is None or pairs is None else _evaluation(found, pairs)
    # Those about J; the KL alone is what its estimators change
    texts = [] if found is None or plan.primary.outcome == "kl" else warnings(found)
    cautions = [f"  WARNING: {text}" for text in texts]
    if plan.grid.over_blocks:
        return [*_over_blocks(plan, scenario, source, pairs), *noise, *cautions]
    return [
        f"power ({source}: {_spreads(scenario)}, "
        f"correlation within a pair {number(scenario.correlation, 2)}; "
        f"{len(scenario.betas)} betas x {scenario.replicates} replicates; level {plan.level:.2g}; "
        f"{SWEEPS:,} simulated sweeps)",
        *_rates(plan, scenario),
        *_detectable(plan, scenario, pairs),
        *noise,
        *_other_designs(plan, scenario),
        *cautions,
    ]


def _over_blocks(plan: Plan, scenario: Scenario, source: str, pairs: Pairs | None) -> Iterator[str]:
    """What is detected, by how much differences vary between blocks, which a pilot over blocks shows."""
    blocks, subject = len(plan.grid.blocks), _SUBJECTS[scenario.outcome]
    spreads = f": {_spreads(scenario)}" if pairs is None else ""
    yield f"power ({source}{spreads}; t test over {blocks} blocks, level {plan.level:.2g})"
    found = detectable_over_blocks(scenario, blocks, plan.level, pairs)
    for count, (spread, reach) in enumerate(found.items()):
        unit = "nats" if scenario.outcome == "kl" else "reward units"
        what = f"difference in {subject} detected with 80% power: {number(reach)} {unit}"
        if pairs is not None and pairs.over_blocks:
            shown = f"as the pilot's means of {len(np.unique(pairs.block))} blocks have SD {number(spread)}"
            yield f"  {what}, {shown}; the error of that SD is included"
        else:
            by = f"SD {number(spread)} ({count} times that of a pair)"
            yield f"  {what}, if the difference varies between blocks by {by}"


def _spreads(scenario: Scenario) -> str:
    if scenario.outcome == "kl":
        return f"log KL spread {number(scenario.log_kl_sd)} between replicates"
    reward, log_kl = number(scenario.reward_sd), number(scenario.log_kl_sd)
    return f"reward spread {reward} between replicates at given KL, log KL {log_kl}"


def _advantage(scenario: Scenario, lift: float) -> str:
    """A true difference of `lift` SD, in words."""
    if scenario.outcome == "kl":
        return f"{number(math.exp(-lift * scenario.sd))} times the KL ({lift:g} SD of log KL)"
    return f"{number(lift * scenario.sd)} more reward ({lift:g} SD)"


def _rates(plan: Plan, scenario: Scenario) -> Iterator[str]:
    size = primary_rate(scenario, lift=0.0, alpha=plan.level)
    yield f"  no difference: the test of {_SUBJECTS[scenario.outcome]} rejects {size}"
    for lift in LIFTS:
        found = primary_rate(scenario, lift=lift, alpha=plan.level)
        enough = replicates_needed(scenario, lift, alpha=plan.level)
        needed = f"{enough} replicates" if enough else f"more than {REPLICATES[-1]} replicates"
        yield f"  {_advantage(scenario, lift)}: detected with power {found}; 80% needs {needed}"


def _detectable(plan: Plan, scenario: Scenario, pairs: Pairs | None) -> Iterator[str]:
    """The difference in J that is detected with 80% power, with a pilot from its pairs; or the KLs' ratio."""
    if scenario.outcome == "kl":
        ratio = detectable_ratio(scenario, plan.level)
        text = "none" if ratio is None else f"{number(ratio)} or less, {number(1 / ratio)} or more"
        yield f"  ratio of KLs detected with 80% power: {text}"
        return
    found = (
        expected_detectable(scenario, plan.level)
        if pairs is None
        else detectable_difference(pairs, plan.grid.replicates, plan.level)
    )
    yield f"  difference in J detected with 80% power: {number(found)} reward units"


def _evaluation(pilot: Sweep, pairs: Pairs) -> Iterator[str]:
    share = noise_share([*matched_evaluations(pilot, pairs).values()])
    if share is not None:
        subject = _SUBJECTS[pilot.plan.primary.outcome]
        yield f"  evaluation noise is {share} of the variance of a pair's difference in {subject}, 95% CI"


def _other_designs(plan: Plan, scenario: Scenario) -> Iterator[str]:
    """The same number of runs as fewer arms with more replicates, or more arms with fewer."""
    arms, betas = len(plan.grid.arms), len(plan.grid.beta)
    runs = len(plan.places)
    differences = "-0.5 and -1 SD of log KL" if scenario.outcome == "kl" else "+0.5 and +1 SD of reward"
    yield f"  about {runs} runs as other designs, power for {differences}:"
    for count in range(2, max(arms, 4) + 2):
        replicates = runs // (count * betas)
        if replicates < 2:
            break
        design, level = replace(scenario, replicates=replicates), plan.primary.alpha / (count - 1)
        half, whole = (f"{primary_rate(design, lift=lift, alpha=level).value:.2f}" for lift in (0.5, 1.0))
        here = " (as planned)" if count == arms else ""
        yield f"    {count} arms x {replicates} replicates: {half} and {whole}{here}"


def _assumed(plan: Plan) -> Scenario:
    """The standard scenario with as many betas as planned, spread over its six."""
    count = len(plan.grid.beta)
    chosen = [round(i * (len(STANDARD.betas) - 1) / max(1, count - 1)) for i in range(count)]
    return replace(
        STANDARD,
        betas=tuple(STANDARD.betas[i] for i in chosen),
        log_kl=tuple(STANDARD.log_kl[i] for i in chosen),
        outcome=plan.primary.outcome,
    )


def _measured(plan: Plan, pilot: Sweep) -> tuple[Scenario, Pairs]:
    if pilot.plan.primary.outcome == "kl" and plan.primary.outcome != "kl":
        raise ConfigurationError(
            f"--pilot: {pilot.directory} decides by the KL alone, so it has no spread of rewards"
        )
    for name in plan.comparisons:
        pairs = match(pilot, name, plan.primary.control)
        if not plan.grid.over_blocks:  # the power is that of a test that swaps pairs
            pairs = replace(pairs, blocks=())
        scenario = scenario_of(pairs, plan.primary.outcome)
        if scenario is not None:
            return scenario, pairs
    raise ConfigurationError(
        f"--pilot: {pilot.directory} has no two matched runs at each beta of {plan.primary.control} and one "
        f"of {', '.join(plan.comparisons)}"
    )
