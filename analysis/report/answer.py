"""The answer of a sweep in one sentence, which is the title of its page."""

import math

from analysis.report.assessment import Assessment
from analysis.stats import Comparison
from analysis.stats.intervals import Interval
from analysis.stats.objective import objective
from analysis.stats.pairs import Pairs
from analysis.stats.text import aligned, aligned_ends, decimals_of, number, whole_percent
from analysis.stats.verdict import Outcome


def title_of(assessment: Assessment) -> str:
    """The conclusion with its numbers; the arms alone if there is no verdict."""
    control = assessment.sweep.plan.primary.control
    others = [name for name in assessment.sweep.plan.grid.arms if name != control]
    comparisons = assessment.comparisons
    if assessment.withheld or not comparisons:
        if len(others) > 2:
            return f"{len(others)} arms against {control}"
        return f"{' and '.join(others)} against {control}" if others else f"{control} alone"
    if len(comparisons) == 1:
        return _of_one(comparisons[0])
    best = max(comparisons, key=_favourable)
    if best.decision.outcome is Outcome.BETTER:
        return _of_one(best)
    words = {
        Outcome.WORSE: f"is worse than {control}",
        Outcome.EQUIVALENT: f"is equivalent to {control}",
    }
    decided = {c.decision.outcome for c in comparisons}
    same = words.get(comparisons[0].decision.outcome) if len(decided) == 1 else None
    return (
        f"Each of {len(comparisons)} arms {same}"
        if same
        else f"No arm of {len(comparisons)} is better than {control}"
    )


def sentence_of(assessment: Assessment) -> str:
    """The answer for a terminal: the title of the page, or why there is no verdict."""
    title = title_of(assessment)
    return f"{title}: no verdict, {assessment.withheld}" if assessment.withheld else title


def meaning_of(assessment: Assessment) -> str:
    """What the title's numbers are."""
    if assessment.withheld or not assessment.comparisons:
        return ""
    primary = assessment.comparisons[0].decision.primary
    if primary.claim.key == "kl":
        what = "The KL to the reference decides, in nats per completion; lower is better."
    else:
        what = (
            "What an arm earns is J = reward − β·KL, which training maximises: the reward of a completion "
            "less β for each nat of KL to the reference."
        )
    level = f"{100 * (1 - primary.level):.4g}"
    return f"{what} Differences are means over β of matched runs, with {level} % intervals."


def _favourable(comparison: Comparison) -> tuple[bool, float]:
    primary = comparison.decision.primary
    sign = 1 if primary.claim.higher_is_better else -1
    return comparison.decision.outcome is Outcome.BETTER, sign * primary.estimate.value


def _of_one(comparison: Comparison) -> str:
    decision, pairs = comparison.decision, comparison.pairs
    primary, value = decision.primary, decision.primary.estimate.value
    treatment, control = pairs.treatment, pairs.control
    decimals = decimals_of([value, *(primary.interval.ends if primary.interval else ())])
    shown, size = aligned(value, decimals), aligned(abs(value), decimals)
    ends = aligned_ends(primary.interval, decimals)
    of_kl = primary.claim.key == "kl"
    match decision.outcome:
        case Outcome.BETTER | Outcome.WORSE if pairs.diverged.any() or math.isnan(value):
            return f"{treatment} is {decision.outcome.value} than {control}, by ranks as runs diverged"
        case Outcome.BETTER | Outcome.WORSE:
            low_high = _ends_of_size(comparison, decimals)
            if of_kl:
                where = "nearer to" if value < 0 else "further from"
                return f"{treatment} ends {size} nats {where} the reference than {control}, {low_high}"
            more = "more" if value > 0 else "less"
            share = _share_of_j(pairs, value)
            return f"{treatment} earns {size} {more} than {control}, {low_high}{share}"
        case Outcome.EQUIVALENT:
            margin = f"±{number(primary.margin)}"
            return f"{treatment} and {control} are equal within {margin}: {shown}, {ends}"
        case Outcome.CANNOT_REJECT:
            return f"These runs are too few to tell {treatment} from {control}"
        case _:
            what = "ends nearer to the reference" if of_kl else "earns more"
            return f"It is open whether {treatment} {what} than {control}: {shown}, {ends}"


def _ends_of_size(comparison: Comparison, decimals: int) -> str:
    """The interval of the size of the difference."""
    primary = comparison.decision.primary
    interval = primary.interval
    if interval is None:
        return "without an interval"
    if primary.estimate.value < 0:
        interval = Interval(-interval.high, -interval.low, interval.level)
    return aligned_ends(interval, decimals)


def _share_of_j(pairs: Pairs, value: float) -> str:
    """The size of a difference as a share of the control's J, if that is not near 0."""
    theirs = float(objective(pairs)[:, 1].mean())
    return f"; {whole_percent(abs(value / theirs))} of J" if abs(theirs) > abs(value) else ""
