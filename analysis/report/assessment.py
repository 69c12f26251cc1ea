"""A sweep with its comparisons: what every section is built from."""

from dataclasses import dataclass
from pathlib import Path

from analysis.results.load import load_sweep
from analysis.results.sweep import Sweep
from analysis.stats import Comparison, Rules, compare
from analysis.stats.matching import match


@dataclass(frozen=True, eq=False)
class Study:
    """A sweep and what the planned tests say about it.

    Attributes:
        sweep: The run directory as read.
        comparisons: One for each estimator other than the control, in plan order; empty if no pair matched.
    """

    sweep: Sweep
    comparisons: tuple[Comparison, ...]

    @property
    def complete(self) -> bool:
        """Whether every planned point has a result or a recorded failure; otherwise there is no verdict."""
        return not self.sweep.missing and bool(self.comparisons)


def load_study(directory: Path) -> Study:
    """Read a run directory and run the planned tests on it."""
    sweep = load_sweep(directory)
    plan = sweep.plan
    designs = [match(sweep, name, plan.control) for name in plan.estimators if name != plan.control]
    rules = Rules(plan.alpha, dict(plan.margins), plan.cuts)
    return Study(sweep, compare([pairs for pairs in designs if len(pairs)], rules))
