"""The arrays of a sweep: its matched pairs, their evaluations and curves, outcomes of arms, chosen rates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from analysis.design.rates import edge_of, trial_outcomes
from analysis.results.records import OBJECTIVE, Run
from analysis.results.sweep import Sweep
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.tuning import Tuned, resampled
from lit_klrb import schema

# Number of bootstrap samples of the chosen rates.
SAMPLES = 2_000


def match(sweep: Sweep, treatment: str, control: str) -> Pairs:
    """The matched pairs of two arms: points of the grid at which both have a result.

    Each pair is a swap unit, unless the pairs of a replicate share a seed across betas: then whole replicates
    are swapped, as their pairs are not independent. If the plan decides by the KL, all rewards are set to 0.
    """
    grid, plan = sweep.grid, sweep.plan
    matched = [
        (index, replicate, treated_run, control_run)
        for index, replicate in product(plan.grid.beta, range(plan.grid.replicates))
        if (treated_run := grid.get((treatment, index, replicate)))
        and (control_run := grid.get((control, index, replicate)))
    ]
    seeds = {treated_run.cell.seed for _, _, treated_run, _ in matched}
    replicates = np.array([row[1] for row in matched], dtype=np.int64)
    outcome = plan.primary.outcome

    def outcomes(key: str) -> FloatArray:
        values = [
            (treated_run.outcome(key), control_run.outcome(key)) for _, _, treated_run, control_run in matched
        ]
        return np.array(values, dtype=np.float64).reshape(-1, 2)

    return Pairs(
        treatment,
        control,
        np.array([plan.grid.beta[row[0]] for row in matched], dtype=np.float64),
        np.array([row[0] for row in matched], dtype=np.int64),
        replicates,
        replicates if len(seeds) < len(matched) else np.arange(len(matched)),
        outcomes(schema.KL),
        np.zeros((len(matched), 2)) if outcome == schema.KL else outcomes(schema.REWARD),
        len(plan.grid.blocks),
        np.array([_gain(sweep, control_run) for *_, control_run in matched]),
        _by_prompt([(treated_run, control_run) for *_, treated_run, control_run in matched], outcome),
    )


def _gain(sweep: Sweep, run: Run) -> float:
    """What a run gained in training, in what decides: J, or the KL that it lost."""
    if sweep.plan.primary.outcome == schema.KL:
        return start_of_run(sweep, run, schema.KL) - run.outcome(schema.KL)
    return run.outcome(OBJECTIVE) - objective_at_start(sweep, run)


def _by_prompt(pairs: Sequence[tuple[Run, Run]], outcome: str) -> FloatArray | None:
    """The difference of each pair in what decides on each prompt, [P, prompts], `nan` if a run diverged.

    None if a run has no values per prompt, or another number of prompts.
    """

    def values(run: Run) -> FloatArray:
        kl, reward = (run.prompts.get(key, np.zeros(0)) for key in (schema.KL, schema.REWARD))
        return kl if outcome == schema.KL else reward - run.point.beta * kl

    counts = {len(values(run)) for pair in pairs for run in pair if not run.diverged}
    if len(counts) != 1 or counts == {0}:
        return None
    nothing = np.full(counts.pop(), math.nan)
    return np.array(
        [
            nothing if run.diverged or control_run.diverged else values(run) - values(control_run)
            for run, control_run in pairs
        ]
    )


def start_of_run(sweep: Sweep, run: Run, key: str) -> float:
    """A metric where a run of the grid starts; `nan` if unknown.

    It is that of its evaluation before the first step; without one, that of the final evaluation of the last
    stage that it starts from.
    """
    if (first := run.first(key)) is not None:
        return first
    stages = list(sweep.plan.stages)
    before = [one for one in sweep.landmarks if one.cell.id in run.cell.needs]
    known = [one for one in before if math.isfinite(one.outcome(schema.KL))]
    return max(known, key=lambda one: stages.index(one.cell.stage)).outcome(key) if known else math.nan


def objective_at_start(sweep: Sweep, run: Run) -> float:
    """J where a run starts, at its own beta; `nan` if unknown."""
    reward, kl = (start_of_run(sweep, run, key) for key in (schema.REWARD, schema.KL))
    return reward - run.point.beta * kl


def warm_starts(sweep: Sweep) -> int:
    """Number of different weights from which the runs of the grid started, as far as files show them."""
    weights = {run.cell.id: run.weights for run in sweep.landmarks if run.weights}
    starts = ("model.policy_path", "model.policy_layers")

    def start(run: Run) -> tuple[object, ...]:
        paths = (str(value) for key, value in run.cell.overrides.items() if key in starts)
        return (*(weights.get(need, need) for need in run.cell.needs), *paths)

    return len({start(run) for run in sweep.grid.values()})


@dataclass(frozen=True)
class ArmOutcome:
    """One arm at one beta."""

    label: str  # the arm
    beta: float  # the weight of the KL
    n: int  # runs that did not diverge
    diverged: int  # runs that diverged
    # Mean over replicates of "reward", "kl", "objective" and "length", with its standard error
    means: dict[str, Estimate]
    # Mean matched difference to the control, by the same keys; empty for the control itself
    differences: dict[str, Estimate]
    higher: dict[str, int]  # number of matched pairs in which the arm has the higher value, by the same keys
    pairs: int  # matched pairs without a diverged run


def arm_outcomes(sweep: Sweep, keys: Sequence[str]) -> list[ArmOutcome]:
    """Every arm at every beta, in plan order, with some outcomes, such as those of `compared`."""
    grid, plan, outcomes = sweep.grid, sweep.plan, []
    control = plan.primary.control
    for label, (index, beta) in product(plan.grid.arms, plan.grid.beta.items()):
        mine = [run for r in range(plan.grid.replicates) if (run := grid.get((label, index, r)))]
        runs = [run for run in mine if not run.diverged]
        values = {key: _values(runs, key) for key in keys}
        # With the control's runs, where neither of the pair diverged
        controls = [grid.get((control, index, run.point.replicate)) for run in runs if label != control]
        pairs = [
            (run, other) for run, other in zip(runs, controls, strict=False) if other and not other.diverged
        ]
        differences = {
            key: _values([treated for treated, _ in pairs], key) - _values([other for _, other in pairs], key)
            for key in (keys if label != control else ())
        }
        # A rounding error, relative to the values, is no positive difference
        least = {key: 2.0**-32 * np.abs(value).max(initial=0.0) for key, value in values.items()}
        outcomes.append(
            ArmOutcome(
                label,
                beta,
                len(runs),
                len(mine) - len(runs),
                {key: Estimate.of_mean(value) for key, value in values.items()},
                {key: Estimate.of_mean(value) for key, value in differences.items()},
                {key: int((value > least[key]).sum()) for key, value in differences.items()},
                len(pairs),
            )
        )
    return outcomes


def _values(runs: Sequence[Run], key: str) -> FloatArray:
    return np.array([run.outcome(key) for run in runs], dtype=np.float64)


def compared(sweep: Sweep) -> tuple[str, ...]:
    """The keys of the described outcomes; without reward and J if the plan decides by the KL.

    The length of completions is one of them, if all runs have it: a low KL may be that of completions that
    end at once.
    """
    alone = sweep.plan.primary.outcome == schema.KL
    outcomes = (schema.KL,) if alone else (schema.REWARD, schema.KL, OBJECTIVE)
    lengths = [run.outcome(schema.LENGTH) for run in sweep.grid.values() if not run.diverged]
    return (*outcomes, schema.LENGTH) if lengths and np.isfinite(lengths).all() else outcomes


def start_of(sweep: Sweep) -> dict[str, float | None]:
    """Reward, KL, length and J at the start: means over the runs of the grid; None if unknown."""
    runs = sweep.grid.values()
    values = {
        key: [start_of_run(sweep, run, key) for run in runs]
        for key in (schema.REWARD, schema.KL, schema.LENGTH)
    }
    values[OBJECTIVE] = [objective_at_start(sweep, run) for run in runs]
    means = {key: float(np.mean(each)) if each else math.nan for key, each in values.items()}
    return {key: mean if math.isfinite(mean) else None for key, mean in means.items()}


def tuned_arms(sweep: Sweep, *, ratio: bool = False) -> dict[str, Tuned]:
    """What is known of each arm's rate; empty without a choice.

    All arms share the resampled replicates, as their runs share seeds.

    Args:
        sweep: The sweep.
        ratio: Whether regrets are those of the logarithm of a KL, where it decides, instead of the KL.
    """
    if sweep.plan.tuning is None or not sweep.locked.rates:
        return {}
    rates = sorted(sweep.plan.tuning.rates)
    outcomes = trial_outcomes(sweep.plan, sweep.trials)
    count = sweep.plan.tuning.replicates
    drawn = np.random.default_rng(0).integers(count, size=(SAMPLES, count))
    tuned = {}
    for arm, rate in sweep.locked.rates.items():
        if rate not in rates or not np.isfinite(outcomes[arm]).any():
            continue
        edge, chosen = edge_of(rates, rate), rates.index(rate)
        logs = sweep.plan.primary.outcome == schema.KL
        values = outcomes[arm]
        if logs:  # negative logarithms of KLs, from negative KLs
            values = -np.log(np.where(values < 0, -values, np.nan))
        kept, best, at_chosen = resampled(values, np.log(rates), chosen, drawn)
        lost = np.exp(-at_chosen) - np.exp(-best) if logs and not ratio else best - at_chosen
        usable = np.isfinite(outcomes[arm]).all(axis=0)
        left_out = tuple(rates[index] for index in np.flatnonzero(usable & ~kept))
        tuned[arm] = Tuned(rate, edge, left_out, np.zeros_like(lost) if edge else np.maximum(0.0, lost))
    return tuned
