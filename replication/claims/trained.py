"""Published sweeps: what training with one arm ends at, against another."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.checks import load_sweep
from analysis.report.matching import match, tuned_arms
from analysis.results.store import DamagedFileError, read_json
from analysis.results.sweep import Sweep
from analysis.stats.claims import KL_DECIDES
from analysis.stats.comparison import Rules, corrected, primary_finding
from analysis.stats.contrast import log_kl_contrast
from analysis.stats.pairs import Pairs
from analysis.stats.tuning import regret_variance
from analysis.stats.verdict import Outcome, Verdict
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

NUMBERS = "results.json"
_ALPHA = 0.05
# The option of prefix rewards; the first is its name in 0.1, under which sweeps are published.
_PREFIX = {"model.prefix_rewards", "model.prefix_reward_every"}


@dataclass(frozen=True, eq=False)
class Trained:
    """A published sweep.

    Attributes:
        title: What it trains, in a few words.
        sweep: Its plan and runs.
        numbers: The numbers of its report.
    """

    title: str
    sweep: Sweep
    numbers: dict[str, Any]

    def arm(self, estimator: str) -> str | None:
        """The first arm of the plan with an estimator and without prefix rewards; None if there is none."""
        arms = self.sweep.plan.grid.arms.items()
        found = (
            label
            for label, made in arms
            if made.get("kl.estimator") == estimator and not _PREFIX & made.keys()
        )
        return next(found, None)

    def noise(self, estimator: str) -> list[dict[str, Any]]:
        """The report's comparisons of an estimator's gradient variance with Monte Carlo's; [] without any."""
        findings = self.numbers["sections"].get("gradient_noise", {"findings": []})["findings"]
        return [one for one in findings if one["estimator"] == estimator]

    def seconds(self, arm: str) -> dict[tuple[int, int], float]:
        """Wall times of an arm's runs by beta index and replicate, where they are known."""
        times = self.sweep.seconds
        return {
            (beta, replicate): times[run.cell.id]
            for (label, beta, replicate), run in self.sweep.grid.items()
            if label == arm and run.cell.id in times
        }

    def claim(self, treatment: str, key: str) -> dict[str, Any]:
        """The report's verdict on one claim about an arm."""
        verdicts = self.numbers["sections"]["verdict"]["verdicts"][treatment]
        return next(one for one in verdicts if one["claim"] == key)


# A sweep, the arm under study, and the arm with which it is compared.
Design = tuple[Trained, str, str]


def load_trained(directory: Path, title: str) -> Trained:
    """Read a published sweep.

    Raises:
        ConfigurationError: If it is not there, or not complete.
        DamagedFileError: If its files are not those of its plan, or cannot be read.
    """
    if not (directory / NUMBERS).exists():
        raise ConfigurationError(f"{directory / NUMBERS} does not exist; lit-klrb report writes it")
    sweep = load_sweep(directory)
    if sweep.invalid:
        raise DamagedFileError(f"{directory}: the files are not those of the plan")
    if sweep.missing:
        raise ConfigurationError(f"{directory}: {len(sweep.missing)} runs of the plan are missing")
    return Trained(title, sweep, read_json(directory / NUMBERS))


def compared(designs: Iterable[Design], finding: Callable[[Pairs, Sweep], Verdict]) -> list[Verdict]:
    """A test of each arm against another, corrected over all designs."""
    pairs = ((match(one.sweep, arm, control), one.sweep) for one, arm, control in designs)
    return corrected([finding(*one) for one in pairs], _ALPHA)


def designs_of(trained: Trained, *pairs: tuple[str, str]) -> list[Design]:
    """Those of the pairs of arms that the sweep has."""
    arms = trained.sweep.plan.grid.arms
    return [(trained, arm, control) for arm, control in pairs if arm in arms and control in arms]


def objective_finding(pairs: Pairs, sweep: Sweep) -> Verdict:
    """The difference in J = reward − β KL, as in a report."""
    return primary_finding(pairs, Rules(tuned=tuned_arms(sweep)))


def kl_finding(pairs: Pairs, sweep: Sweep) -> Verdict:
    """The log ratio of the KLs, with the choice of rates where the KL chose them."""
    tuned = tuned_arms(sweep, ratio=True) if sweep.plan.primary.outcome == schema.KL else {}
    variance = regret_variance(tuned, pairs.treatment, pairs.control)
    return Verdict.on(KL_DECIDES, pairs, log_kl_contrast(pairs), variance)


@functools.cache
def objectives(trained: Trained) -> dict[str, Verdict]:
    """J of each arm against the plan's control, by arm: what is compared if the plan decides by J."""
    plan = trained.sweep.plan
    designs = [(trained, arm, plan.primary.control) for arm in plan.comparisons]
    return {one.treatment: one for one in compared(designs, objective_finding)}


def decidable(verdict: Verdict) -> bool:
    """Whether the test could have rejected: otherwise it says nothing about a claim."""
    return verdict.outcome is not Outcome.CANNOT_REJECT


def better(verdict: Verdict) -> bool:
    """Whether the treatment is significantly better."""
    return verdict.outcome is Outcome.BETTER


def worse(verdict: Verdict) -> bool:
    """Whether the treatment is significantly worse."""
    return verdict.outcome is Outcome.WORSE
