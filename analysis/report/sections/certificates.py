"""Size and power of each test on the reader's own design, measured by simulating sweeps like this one."""

from collections.abc import Sequence

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.plan import PRIMARY_OUTCOMES
from analysis.stats.power import CONTRIBUTIONS, Rate, Scenario, rejection_rates, scenario_of
from analysis.stats.text import number

# Simulated sweeps, as many as take seconds: fewer for large designs.
_PAIRS, _FEWEST, _MOST = 24_000, 250, 1_000
# True advantage in reward, in units of its spread between replicates -> the tests that are run: all of them
# where there is none, which measures their size, else the ones that decide.
LIFTS: dict[float, Sequence[str]] = {0.0: [*CONTRIBUTIONS], 0.5: PRIMARY_OUTCOMES, 1.0: PRIMARY_OUTCOMES}


def certificates(assessment: Assessment) -> Section | None:
    """How often each test rejects where there is nothing, and where there is something."""
    found = {
        comparison.pairs.treatment: scenario
        for comparison in assessment.comparisons
        if (scenario := scenario_of(comparison.pairs)) is not None
    }
    if assessment.withheld or not found:
        return None
    alpha = assessment.sweep.plan.primary.alpha
    rates = {
        name: [
            rejection_rates(scenario, tests, lift=lift, alpha=alpha, sweeps=_sweeps(scenario))
            for lift, tests in LIFTS.items()
        ]
        for name, scenario in found.items()
    }
    return Section(
        "certificates",
        "What these tests find on this design",
        paragraphs=[
            "Sweeps were simulated with the betas, replicates, spreads and correlations of "
            "this one (one curve of reward against KL, Gaussian noise on both), and the tests were run on "
            f"each. With labels that mean nothing a test should reject in at most {alpha:.0%}: its measured "
            "type-I error. Power is for one test alone, two-sided, before Holm's correction. The simulation "
            "is only as good as its Gaussian noise.",
            *(_spread(name, scenario) for name, scenario in found.items()),
        ],
        tables=[_table(name, found[name], rates[name], alpha) for name in found],
        numbers={
            name: {
                key: {
                    str(lift): rate[key].value
                    for lift, rate in zip(LIFTS, measured, strict=True)
                    if key in rate
                }
                for key in CONTRIBUTIONS
            }
            for name, measured in rates.items()
        },
    )


def _sweeps(scenario: Scenario) -> int:
    pairs = len(scenario.betas) * scenario.replicates
    return min(_MOST, max(_FEWEST, _PAIRS // pairs))


def _spread(name: str, scenario: Scenario) -> str:
    return (
        f"{name}: the reward's standard deviation between replicates, at given KL, is "
        f"{number(scenario.reward_sd)} reward units; log KL's is {number(scenario.log_kl_sd)}; the two runs "
        f"of a pair correlate by {number(scenario.correlation, 2)}."
    )


def _table(name: str, scenario: Scenario, rates: list[dict[str, Rate]], alpha: float) -> Table:
    return Table(
        f"{name}: share of {_sweeps(scenario):,} simulated sweeps in which a test rejects at "
        f"{alpha:g}, ± its Monte-Carlo standard error.",
        (
            "Test",
            "Type-I error here",
            *(f"Power at +{number(lift * scenario.reward_sd)} reward" for lift in [*LIFTS][1:]),
        ),
        [(key, *(rate_text(rate[key]) if key in rate else "–" for rate in rates)) for key in CONTRIBUTIONS],
    )


def rate_text(rate: Rate) -> str:
    """A rate with its Monte-Carlo error.

    Example:
        >>> rate_text(Rate(0.048, 1000))
        '0.048 ± 0.007'
    """
    return f"{rate.value:.3f} ± {rate.error:.3f}"
