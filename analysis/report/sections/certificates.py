"""Size and power of the test that decides, on the reader's own design: sweeps like this one, simulated."""

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.stats.power import SWEEPS, Rate, detectable_difference, rejection_rates
from analysis.stats.scenario import Scenario, scenario_of
from analysis.stats.text import number

# True advantages in reward, in units of its spread between replicates; at 0 the rate is the size.
LIFTS = (0.0, 0.5, 1.0)


def certificates(assessment: Assessment) -> Section | None:
    """How often the test of J rejects where there is nothing, and where there is something."""
    plan = assessment.sweep.plan
    if assessment.withheld or plan.primary.outcome == "kl":
        return None
    found = {
        comparison.pairs.treatment: scenario
        for comparison in assessment.comparisons
        if (scenario := scenario_of(comparison.pairs)) is not None
    }
    if not found:
        return None
    rates = {name: power_of(scenario, plan.level) for name, scenario in found.items()}
    reach = {
        c.pairs.treatment: detectable_difference(c.pairs, c.pairs.replicates, plan.level)
        for c in assessment.comparisons
        if c.pairs.treatment in found
    }
    return Section(
        "certificates",
        "What the test of J finds on this design",
        paragraphs=[
            "Sweeps were simulated with the betas, replicates, spreads and correlations of "
            "this one (one curve of reward against KL, Gaussian noise on both), and the test of J was run on "
            f"each at the level of the first step of Holm's correction, {plan.level:.2g}. With labels that "
            "mean nothing it should reject no more often than that: its measured type-I error. The "
            "simulation is only as good as its Gaussian noise; docs/certificates.md has the other tests.",
            *(_spread(name, scenario) for name, scenario in found.items()),
        ],
        tables=[_table(found, rates, reach, plan.level)],
        folded=True,
        numbers={
            name: {
                **{str(lift): rate.value for lift, rate in measured.items()},
                "detectable": reach[name],
            }
            for name, measured in rates.items()
        },
    )


def power_of(scenario: Scenario, level: float) -> dict[float, Rate]:
    """The rate at which the test of J rejects at `level`, for each of `LIFTS`."""
    return {lift: rejection_rates(scenario, lift=lift, alpha=level)["objective"] for lift in LIFTS}


def _spread(name: str, scenario: Scenario) -> str:
    return (
        f"{name}: the reward's standard deviation between replicates, at given KL, is "
        f"{number(scenario.reward_sd)} reward units; log KL's is {number(scenario.log_kl_sd)}; the two runs "
        f"of a pair correlate by {number(scenario.correlation, 2)}."
    )


def _table(
    found: dict[str, Scenario],
    rates: dict[str, dict[float, Rate]],
    reach: dict[str, float | None],
    level: float,
) -> Table:
    return Table(
        f"Share of {SWEEPS:,} simulated sweeps in which the test of J rejects at {level:.2g}, ± its "
        "Monte-Carlo standard error. One SD is that of the reward between replicates at given KL. “Found "
        "in 80%” is the smallest difference in J, in reward units, that a t test at this level finds in 80% "
        "of cases.",
        (
            "Estimator",
            "SD",
            "Type-I error here",
            *(f"Power at +{lift:g} SD" for lift in LIFTS[1:]),
            "Found in 80%",
        ),
        [
            (name, number(found[name].reward_sd), *map(str, rates[name].values()), number(detectable))
            for name, detectable in reach.items()
        ],
    )
