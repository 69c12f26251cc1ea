"""Power of a planned sweep by simulation, from the variances of a pilot or from assumptions, and warnings."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis.checks import load_sweep
from analysis.report.matching import match, matched_evaluations
from analysis.results import Plan
from analysis.results.artifacts import GradientStudy
from analysis.results.records import OBJECTIVE
from analysis.results.sweep import Sweep
from analysis.stats.gradient_noise import NoiseSnapshot
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import Pairs
from analysis.stats.power import (
    REPLICATES,
    SWEEPS,
    detectable_difference,
    detectable_over_blocks,
    detectable_ratio,
    expected_detectable,
    noise_share,
    primary_rate,
    replicates_needed,
)
from analysis.stats.scenario import STANDARD, Scenario, scenario_of
from analysis.stats.text import interval_text, number
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

# Share of the KL in the noise of the whole gradient below which its estimator hardly matters.
LEAST_SHARE = 0.05


def warnings(pilot: Sweep) -> Iterator[str]:
    """One line per reason to doubt that a sweep like the pilot can show a difference.

    Such as a beta at which J does not rise in training, or a KL whose gradient is a small part of the noise.
    """
    for index, beta in pilot.plan.grid.beta.items():
        runs = [run for run in pilot.grid.values() if run.point.beta_index == index and not run.diverged]
        starts = [(run, run.first(schema.REWARD), run.first(schema.KL)) for run in runs]
        rises = [
            run.outcome(OBJECTIVE) - (reward - beta * kl)
            for run, reward, kl in starts
            if reward is not None and kl is not None
        ]
        mean = Estimate.of_mean(np.array(rises))
        if (interval := mean.interval()) is not None and interval.low <= 0:
            yield (
                f"at beta {beta:g} J does not rise in training: {number(mean.value)}, "
                f"{interval_text(interval)} over {len(rises)} runs"
            )
    for _, study in pilot.studies(GradientStudy)[:1]:
        control = pilot.plan.primary.control
        name = control if control in study.estimators else study.estimators[0]
        snapshots = [NoiseSnapshot(one.step, one.gram, study.estimators) for one in study.snapshots]
        share = max(one.noise("KL", name) / one.noise("total", name) for one in snapshots)
        if share < LEAST_SHARE:
            yield (
                f"the KL's gradient under {name} has at most {share:.1%} of the whole gradient's noise (beta "
                f"{study.snapshots[0].beta:g}): another estimator of the KL would hardly change it"
            )


# True differences in what decides, reward or log KL, in standard deviations between replicates.
LIFTS = (0.25, 0.5, 1.0)
_SUBJECTS = {"objective": "J", "kl": "the KL"}


def power(plan: Plan, pilot: Path | None) -> list[str]:
    """Lines for `analysis plan`: type-I error, power, and replicates needed.

    Args:
        plan: The plan; each treatment is compared with the control at the level of each comparison.
        pilot: The directory of an earlier sweep with the plan's control and one of its other arms.

    Raises:
        ConfigurationError: If the pilot has no such arms, or too few runs to estimate variances, or no
            rewards where the plan decides by J.
    """
    scenario, source, pairs = _assumed(plan), "assumed, no pilot", None
    remarks: list[str] = []
    if pilot is not None:
        found = load_sweep(pilot)
        if found.invalid:
            raise ConfigurationError(f"--pilot: {pilot} cannot be trusted: {found.invalid[0]}")
        scenario, pairs = _measured(plan, found)
        source = f"from {pairs.treatment} against {pairs.control} in {found.directory}"
        if noise := noise_share([*matched_evaluations(found, pairs).values()]):
            what = f"the variance of a pair's difference in {_SUBJECTS[found.plan.primary.outcome]}, 95% CI"
            remarks.append(f"  evaluation noise is {noise} of {what}")
        if plan.primary.outcome != "kl":  # they are about J
            remarks += [f"  WARNING: {text}" for text in warnings(found)]
    scenario = replace(scenario, replicates=plan.grid.replicates)
    if plan.grid.over_blocks:
        return [*_over_blocks(plan, scenario, source, pairs), *remarks]
    return [
        f"power ({source}: {spreads(scenario)}; {len(scenario.betas)} betas x {scenario.replicates} "
        f"replicates; level {plan.level:.2g}; {SWEEPS:,} simulated sweeps)",
        *_rates(plan, scenario),
        *_detectable(plan, scenario, pairs),
        *remarks,
    ]


def _over_blocks(plan: Plan, scenario: Scenario, source: str, pairs: Pairs | None) -> Iterator[str]:
    """What is detected, by how much differences vary between blocks, which a pilot over blocks shows."""
    blocks, subject = len(plan.grid.blocks), _SUBJECTS[scenario.outcome]
    assumed = f": {spreads(scenario)}" if pairs is None else ""
    yield f"power ({source}{assumed}; t test over {blocks} blocks, level {plan.level:.2g})"
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


def spreads(scenario: Scenario) -> str:
    """How much runs vary, in words."""
    pair = f"correlation within a pair {number(scenario.correlation, 2)}"
    if scenario.outcome == "kl":
        return f"log KL spread {number(scenario.log_kl_sd)} between replicates, {pair}"
    reward, log_kl = number(scenario.reward_sd), number(scenario.log_kl_sd)
    return f"reward spread {reward} between replicates at given KL, log KL {log_kl}, {pair}"


def _rates(plan: Plan, scenario: Scenario) -> Iterator[str]:
    size = primary_rate(scenario, lift=0.0, alpha=plan.level)
    yield f"  no difference: the test of {_SUBJECTS[scenario.outcome]} rejects {size}"
    for lift in LIFTS:
        found = primary_rate(scenario, lift=lift, alpha=plan.level)
        enough = replicates_needed(scenario, lift, alpha=plan.level)
        needed = f"{enough} replicates" if enough else f"more than {REPLICATES[-1]} replicates"
        advantage = (
            f"{number(math.exp(-lift * scenario.sd))} times the KL ({lift:g} SD of log KL)"
            if scenario.outcome == "kl"
            else f"{number(lift * scenario.sd)} more reward ({lift:g} SD)"
        )
        yield f"  {advantage}: detected with power {found}; 80% needs {needed}"


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
    reach = "unknown, of too few pairs" if found is None else f"{number(found)} reward units"
    yield f"  difference in J detected with 80% power: {reach}{'' if pairs is None else of_finite(pairs)}"


def of_finite(pairs: Pairs) -> str:
    """From which pairs a difference in J is, if not from all."""
    finite, total = len(pairs.finite), len(pairs)
    return f", from the {finite} of {total} pairs in which no run diverged" if finite < total else ""


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
