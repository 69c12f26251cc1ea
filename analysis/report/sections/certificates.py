"""Size and power of the primary test, from simulated sweeps of the same design."""

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.stats.power import SWEEPS, Rate, detectable_difference, rejection_rates
from analysis.stats.scenario import Scenario, scenario_of
from analysis.stats.text import number

# True advantages in reward, in units of its spread between replicates; at 0 the rate is the size.
LIFTS = (0.0, 0.5, 1.0)


def certificates(assessment: Assessment) -> Section | None:
    """The rate at which the test of J rejects, without and with a true difference."""
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
        "Power of the test of J in this design",
        paragraphs=[
            "Sweeps were simulated with the betas, replicates, spreads and correlations of "
            "this one (one curve of reward against KL, Gaussian noise on both), and the test of J was run on "
            f"each at the level of the first step of Holm's correction, {plan.level:.2g}. Without a true "
            "difference it should reject no more often than that; the measured rate is its type-I error. The "
            "simulation assumes Gaussian noise. For the other tests see docs/certificates.md.",
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
        "Monte-Carlo standard error. One SD is that of the reward between replicates at given KL. "
        "“Detectable” is the difference in J, in reward units, that a t test at this level detects with 80% "
        "power.",
        (
            "Arm",
            "SD",
            "Type-I error",
            *(f"Power at +{lift:g} SD" for lift in LIFTS[1:]),
            "Detectable",
        ),
        [
            (name, number(found[name].reward_sd), *map(str, rates[name].values()), number(detectable))
            for name, detectable in reach.items()
        ],
    )
