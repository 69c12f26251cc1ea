"""Checks: noise of the evaluation, size and power of the primary test."""

from collections.abc import Sequence

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.report.matching import matched_evaluations
from analysis.report.power import of_finite, spreads
from analysis.stats import Comparison
from analysis.stats.contrast import rejections
from analysis.stats.power import (
    SWEEPS,
    NoiseShare,
    detectable_difference,
    detectable_ratio,
    noise_share,
    primary_rate,
)
from analysis.stats.scenario import scenario_of
from analysis.stats.text import count, fixed, number

# True advantages in reward, or in log KL where the KL decides, in units of its spread between replicates; at
# 0 the rate is the size.
LIFTS = (0.0, 0.5, 1.0)
# The units of the columns, by what decides.
_SCALES = {
    "kl": "One SD is that of log KL between replicates, by which the treatment's is lower. “Detectable” is "
    "the ratio of KLs, below 1, that the test detects in 80% of the sweeps.",
    "objective": "One SD is that of the reward between replicates at given KL. “Detectable” is the "
    "difference in J, in reward units, that a t test at this level detects with 80% power.",
}


def certificates(assessment: Assessment) -> Section | None:
    """The rate at which the primary test rejects, without and with a true difference."""
    plan = assessment.sweep.plan
    if assessment.withheld:
        return None
    by_kl = plan.primary.outcome == "kl"
    subject = "the KL" if by_kl else "J"
    title = f"Power of the test of {subject} in this design"
    over = [one for one in assessment.comparisons if one.primary.over_blocks]
    if over:
        return _over_blocks(over, title, plan.level)
    model = "Gaussian noise on log KL" if by_kl else "one curve of reward against KL, Gaussian noise on both"
    found = {
        comparison.pairs.treatment: scenario
        for comparison in assessment.comparisons
        if (scenario := scenario_of(comparison.pairs, plan.primary.outcome)) is not None
    }
    if not found:
        return None
    rates = {
        name: {lift: primary_rate(scenario, lift=lift, alpha=plan.level) for lift in LIFTS}
        for name, scenario in found.items()
    }
    # What is detected with 80% power: a difference in J, or a ratio of KLs
    reach = {
        pairs.treatment: detectable_ratio(found[pairs.treatment], plan.level)
        if by_kl
        else detectable_difference(pairs, pairs.replicates, plan.level)
        for pairs in (comparison.pairs for comparison in assessment.comparisons)
        if pairs.treatment in found
    }
    told = {one.pairs.treatment: of_finite(one.pairs) for one in assessment.comparisons}
    powers = [f"Power at {'−' if by_kl else '+'}{lift:g} SD" for lift in LIFTS[1:]]
    return Section(
        "certificates",
        title,
        paragraphs=[
            "Sweeps were simulated with the betas, replicates, spreads and correlations of "
            f"this one ({model}), and the test of {subject} was run on "
            f"each at the level of one comparison, {plan.level:.2g}. Without a true "
            "difference it should reject no more often than that; the measured rate is its type-I error. "
            "The other tests: replication/evidence/certificates.md.",
            *(f"{name}: {spreads(scenario)}{told[name]}." for name, scenario in found.items()),
        ],
        tables=[
            Table(
                f"Share of {SWEEPS:,} simulated sweeps in which the test of {subject} rejects at "
                f"{plan.level:.2g}, ± its Monte-Carlo standard error. {_SCALES[plan.primary.outcome]}",
                ("Arm", "SD", "Type-I error", *powers, "Detectable"),
                [
                    (name, number(found[name].sd), *map(str, rates[name].values()), number(detectable))
                    for name, detectable in reach.items()
                ],
            )
        ],
        folded=True,
        numbers={
            name: {str(lift): rate.value for lift, rate in measured.items()} | {"detectable": reach[name]}
            for name, measured in rates.items()
        },
    )


def _over_blocks(comparisons: Sequence[Comparison], title: str, level: float) -> Section:
    """What the t test over blocks detects, and how often it rejects without a mean difference."""
    verdicts = {one.pairs.treatment: one.primary for one in comparisons}
    blocks = min(verdict.blocks for verdict in verdicts.values())
    reach = {name: verdict.estimate.detectable(level) for name, verdict in verdicts.items()}
    rates = rejections(blocks, level)
    unit = next(iter(verdicts.values())).unit
    detected = ", ".join(f"{name} {number(found)}" for name, found in reach.items())
    return Section(
        "certificates",
        title,
        paragraphs=[
            f"Difference that the t test over blocks detects with 80% power at {level:.2g}, in {unit}, the "
            f"error of the blocks' standard deviation included: {detected}.",
            "The test is of the mean, and right for blocks whose differences are about normal. If they are "
            "skewed, or 10 % of the blocks collapse, it says “better” or “worse” too often, and no rule can "
            "correct it: most samples have no collapse to see.",
        ],
        tables=[
            Table(
                f"Shares of 4,000 simulated sweeps of {count(blocks, 'block')} without a mean difference in "
                f"which the test rejects at {level:.2g}.",
                ("Differences of blocks", "Higher", "Lower"),
                [(name, *(fixed(one, 3) for one in found)) for name, found in rates.items()],
            )
        ],
        folded=True,
        numbers={name: {"detectable": found} for name, found in reach.items()}
        | {"rejections": {name: list(found) for name, found in rates.items()}},
    )


def evaluation_noise(assessment: Assessment) -> Section | None:
    """The share for each comparison, over all betas and at each; None without values per prompt."""
    found: dict[str, dict[str, NoiseShare]] = {}
    for comparison in assessment.comparisons:
        differences = matched_evaluations(assessment.sweep, comparison.pairs)
        shares = {str(index): noise_share([values]) for index, values in differences.items()}
        shares["all"] = noise_share(list(differences.values()))
        if known := {key: share for key, share in shares.items() if share is not None}:
            found[comparison.pairs.treatment] = known
    if not found:
        return None
    told = ", ".join(f"{shares['all']} for {name}" for name, shares in found.items())
    plan = assessment.sweep.plan
    betas = {str(index): f"{beta:g}" for index, beta in plan.grid.beta.items()}
    rows = [(name, key, share) for name, shares in found.items() for key, share in shares.items()]
    return Section(
        "evaluation_noise",
        "Noise of the evaluation",
        paragraphs=[
            f"Of the variance of a matched pair's difference in {plan.primary.symbol}, this share is noise "
            f"of the evaluation, with its 95% interval: {told}. More prompts in the evaluation, or more "
            "completions per prompt, reduce it; the rest differs between runs, and only more replicates "
            "average it out."
        ],
        details=[
            Table(
                "From the pairs' differences per prompt. At a single β the share rests on few replicates.",
                ("Arm", "β", "Share"),
                [(name, betas.get(key, "all"), str(share)) for name, key, share in rows],
            )
        ],
        numbers={
            name: {
                key: {"share": share.value, "interval": share.interval.ends} for key, share in shares.items()
            }
            for name, shares in found.items()
        },
    )
