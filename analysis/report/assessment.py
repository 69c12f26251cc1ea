"""A sweep with its comparisons, from which all sections are built."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.results.plan import Plan
from analysis.results.records import Run
from analysis.results.sweep import Sweep, load_sweep
from analysis.stats import Comparison, Pairs, Rules, compare
from analysis.stats.hypervolume import Reference
from analysis.stats.matching import match, matched_curves
from analysis.stats.pairs import Curves
from analysis.stats.primary import primary_verdicts
from analysis.stats.tuning import tuned_arms
from lit_klrb import schema

# Why a plan that was changed after results could have been seen has no verdict.
GREW = "the plan was changed after results could have been seen"


@dataclass(frozen=True, eq=False)
class Assessment:
    """A sweep and the results of the planned tests.

    Attributes:
        sweep: The run directory as read.
        comparisons: One per arm other than the control, in plan order; empty without matched pairs.
        withheld: Why there is no verdict, in a few words; empty if there is one.
        worst: What the verdicts would be if the lost runs had been the worst; "" if none was lost.
    """

    sweep: Sweep
    comparisons: tuple[Comparison, ...]
    withheld: str = ""
    worst: str = ""

    @property
    def complete(self) -> bool:
        """Whether every planned run has a result or a recorded failure."""
        return not self.sweep.missing


def load_assessment(directory: Path) -> Assessment:
    """Read a run directory and run the planned tests on it."""
    sweep = load_sweep(directory)
    plan = sweep.plan
    designs = [match(sweep, name, plan.primary.control) for name in plan.comparisons]
    designs = [pairs for pairs in designs if len(pairs)]
    withheld = _withheld(sweep, designs)
    rules = Rules(
        plan.primary.alpha,
        plan.primary.margins,
        plan.primary.outcome,
        len(plan.comparisons),
        corner_of(sweep),
        withheld,
        tuned_arms(sweep),
    )
    comparisons = compare(designs, rules, [_curves(sweep, pairs) for pairs in designs])
    return Assessment(sweep, comparisons, withheld, "" if withheld else _if_worst(sweep, rules))


def _if_worst(sweep: Sweep, rules: Rules) -> str:
    """The verdicts if each lost run had had the outcome of the worst run of its beta; "" if none was lost.

    Lost are the runs that ended without a result, and those that an import lacks and whose replicates it
    leaves out.
    """
    plan, places = sweep.plan, {cell.place: cell for cell in sweep.locked.cells.values()}
    lost = [*sweep.lost, *(place for one in sweep.failures if (place := one.cell.place) is not None)]
    everywhere = [run for run in (*sweep.grid.values(), *sweep.left_out) if not run.diverged]
    filled = [*sweep.runs, *sweep.left_out]
    for arm, index, replicate in lost:
        same = [run for run in everywhere if run.point.beta_index == index]
        if same:
            worst = min(same, key=lambda run: _decisive(run, plan))
            filled.append(replace(worst, cell=places[arm, index, replicate]))
    if not lost:
        return ""
    whole = replace(sweep, runs=tuple(filled), left_out=())
    designs = [match(whole, name, plan.primary.control) for name in plan.comparisons]
    found = primary_verdicts([pairs for pairs in designs if len(pairs)], rules)
    told = "; ".join(f"{one.treatment} against {one.control} {one.outcome.value}" for one in found)
    return f"If {len(lost)} lost runs had been as the worst of their β, the verdict would be: {told}."


def _decisive(run: Run, plan: Plan) -> float:
    """What decides, higher being better."""
    kl = run.outcome(schema.KL)
    return -kl if plan.primary.outcome == schema.KL else run.outcome(schema.REWARD) - run.point.beta * kl


def _withheld(sweep: Sweep, designs: Sequence[Pairs]) -> str:
    if sweep.invalid:
        return "the runs are not those of the plan, or cannot be compared"
    if sweep.missing:
        return "partial sweep"
    if sweep.locked.changed_after_results:
        return GREW
    return "" if designs else "no two runs form a matched pair"


def _curves(sweep: Sweep, pairs: Pairs) -> list[Curves]:
    metrics = (schema.KL,) if sweep.plan.primary.outcome == schema.KL else (schema.REWARD, schema.KL)
    found = (matched_curves(sweep, pairs, metric) for metric in metrics)
    return [curves for curves in found if curves is not None]


def corner_of(sweep: Sweep) -> Reference | None:
    """The corner of the hypervolume: the worst KL and reward of any run.

    Returns:
        KL and reward; None if hypervolume is undefined, as a KL is not positive or the reward is void.
    """
    runs = [run for run in sweep.grid.values() if not run.diverged]
    kl, reward = ([run.outcome(key) for run in runs] for key in (schema.KL, schema.REWARD))
    if not runs or min(kl) <= 0 or sweep.plan.primary.outcome == schema.KL:
        return None
    return max(kl), min(reward)
