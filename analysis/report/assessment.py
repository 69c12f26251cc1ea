"""A sweep with its comparisons, from which all sections are built, and its answer in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.checks import load_sweep
from analysis.report.matching import match, matched_curves, tuned_arms
from analysis.results.sweep import Sweep
from analysis.stats import Comparison, Pairs, Rules, compare
from analysis.stats.contrast import objective
from analysis.stats.frontier import Reference
from analysis.stats.intervals import Interval
from analysis.stats.pairs import Curves
from analysis.stats.primary import primary_contrast, primary_verdicts
from analysis.stats.text import aligned, aligned_ends, count, decimals_of, number, whole_percent
from analysis.stats.verdict import Outcome
from lit_klrb import schema

# Why a plan that was changed after results could have been seen has no verdict.
GREW = "the plan was changed after results could have been seen"


@dataclass(frozen=True, eq=False)
class Assessment:
    """A sweep and the results of the planned tests."""

    sweep: Sweep  # the run directory as read
    # One per arm other than the control, in plan order; empty without matched pairs
    comparisons: tuple[Comparison, ...]
    withheld: str = ""  # why there is no verdict, in a few words; empty if there is one
    # What the verdicts would be if the lost runs had been those least in their favour; "" if none was lost
    worst: str = ""


def load_assessment(directory: Path) -> Assessment:
    """Read a run directory and run the planned tests on it."""
    sweep = load_sweep(directory)
    plan = sweep.plan
    designs = [match(sweep, name, plan.primary.control) for name in plan.comparisons]
    designs = [pairs for pairs in designs if len(pairs)]
    withheld = _withheld(sweep, designs)
    primary = plan.primary
    given = primary.alpha, primary.margins, primary.outcome, len(plan.comparisons)
    rules = Rules(*given, corner_of(sweep), withheld, tuned_arms(sweep))
    comparisons = compare(designs, rules, [_curves(sweep, pairs) for pairs in designs])
    return Assessment(sweep, comparisons, withheld, "" if withheld else _if_worst(sweep, comparisons, rules))


def _if_worst(sweep: Sweep, comparisons: Sequence[Comparison], rules: Rules) -> str:
    """The verdicts if the lost runs had been those least in their favour; "" if none was lost.

    Lost are the runs that ended without a result, and those that an import lacks and whose replicates it
    leaves out. A bad control speaks for the other arm: the control's are as the best run of their beta, those
    of the other arm as the worst; the reverse if the arm is worse.
    """
    lost = [*sweep.lost, *(place for one in sweep.failures if (place := one.cell.place) is not None)]
    if not lost:
        return ""
    control = sweep.plan.primary.control
    worse = {one.pairs.treatment for one in comparisons if one.primary.outcome is Outcome.WORSE}
    designs = [
        match(_filled(sweep, lost, control if name not in worse else name), name, control)
        for name in sweep.plan.comparisons
    ]
    found = primary_verdicts([pairs for pairs in designs if len(pairs)], rules)
    told = "; ".join(f"{one.treatment} against {one.control} {one.outcome.value}" for one in found)
    return (
        f"If {count(len(lost), 'lost run')} had been as the best of their β for {control}, and as the worst "
        f"for other arms (the reverse where an arm is worse), the verdict would be: {told}."
    )


def _filled(sweep: Sweep, lost: Sequence[tuple[str, int, int]], best: str) -> Sweep:
    """A sweep whose lost runs are as the worst run of their beta, those of the arm `best` as the best."""
    outcome, places = sweep.plan.primary.outcome, {cell.place: cell for cell in sweep.locked.cells.values()}
    everywhere = [run for run in (*sweep.grid.values(), *sweep.left_out) if not run.diverged]
    filled = [*sweep.runs, *sweep.left_out]
    for arm, index, replicate in lost:
        same = [run for run in everywhere if run.point.beta_index == index]
        if same:
            choose = max if arm == best else min
            taken = choose(same, key=lambda run: run.decisive(outcome))
            filled.append(replace(taken, cell=places[arm, index, replicate]))
    return replace(sweep, runs=tuple(filled), left_out=())


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


def title_of(assessment: Assessment) -> str:
    """The conclusion with its numbers; the arms alone if there is no verdict."""
    plan, comparisons = assessment.sweep.plan, assessment.comparisons
    control, others = plan.primary.control, plan.comparisons
    if assessment.withheld or not comparisons:
        if len(others) > 2:
            return f"{len(others)} arms against {control}"
        return f"{' and '.join(others)} against {control}" if others else f"{control} alone"
    if len(comparisons) == 1:
        return _of_one(comparisons[0])
    best = max(comparisons, key=_favourable)
    if best.primary.outcome is Outcome.BETTER:
        return _of_one(best)
    arms, found = f"{len(comparisons)} arms", {one.primary.outcome for one in comparisons}
    words = {Outcome.WORSE: "worse than", Outcome.EQUIVALENT: "equivalent to"}
    if len(found) == 1 and (same := words.get(best.primary.outcome)):
        return f"Each of {arms} is {same} {control}"
    if found <= words.keys():  # what is open may be better
        return f"No arm of {len(comparisons)} is better than {control}"
    if found == {Outcome.CANNOT_REJECT}:
        return _nothing_to_test(comparisons, arms, control)
    return f"It is open whether any of {arms} {_aim(best)} {control}"


def sentence_of(assessment: Assessment) -> str:
    """The answer for a terminal: the title of the page, or why there is no verdict."""
    title = title_of(assessment)
    return f"{title}: no verdict, {assessment.withheld}" if assessment.withheld else title


def meaning_of(assessment: Assessment) -> str:
    """What the title's numbers are."""
    if assessment.withheld or not assessment.comparisons:
        return ""
    primary = assessment.comparisons[0].primary
    if primary.claim.key == "kl":
        what = "The KL to the reference decides, in nats per completion; lower is better."
    else:
        what = (
            "What an arm earns is J = reward − β·KL, which training maximises: the reward of a completion "
            "less β for each nat of KL to the reference."
        )
    level = f"{100 * (1 - primary.level):.4g}"
    ranked = [one.pairs.treatment for one in assessment.comparisons if one.primary.by_ranks]
    as_ranks = f" Those of {', '.join(ranked)} are of ranks, as runs diverged." if ranked else ""
    return f"{what} Differences are means over β of matched runs, with {level} % intervals.{as_ranks}"


def _favourable(comparison: Comparison) -> tuple[bool, bool, float]:
    """The key by which the best comparison is the largest; differences of ranks are not those of values."""
    primary = comparison.primary
    sign = 1 if primary.claim.higher_is_better else -1
    return primary.outcome is Outcome.BETTER, not primary.by_ranks, sign * primary.estimate.value


def _aim(comparison: Comparison) -> str:
    """What a better arm does."""
    if comparison.primary.by_ranks:
        return "is better than"
    by_kl = comparison.primary.claim.key == "kl"
    return "ends nearer to the reference than" if by_kl else "earns more than"


def _nothing_to_test(comparisons: Sequence[Comparison], arm: str, control: str) -> str:
    """Why the test cannot reject: no pair has a difference, or there are too few of them."""
    designs, key = [one.pairs for one in comparisons], comparisons[0].primary.claim.key
    if all(pairs.diverged.all() for pairs in designs):
        return f"All runs of {arm} and {control} diverged"
    if not any(primary_contrast(pairs, key).values.any() for pairs in designs):
        what = "KL" if key == "kl" else "J"
        return f"No run of {arm} differs in {what} from that of {control} that it is paired with"
    which = arm if len(comparisons) == 1 else f"any of {arm}"
    return f"These runs are too few to tell {which} from {control}"


def _of_one(comparison: Comparison) -> str:
    primary, pairs = comparison.primary, comparison.pairs
    value, interval = primary.estimate.value, primary.interval
    treatment, control = pairs.treatment, pairs.control
    decimals = decimals_of([value, *(interval.ends if interval else ())])
    shown, ends = aligned(value, decimals), aligned_ends(interval, decimals)
    of_kl = primary.claim.key == "kl"
    match primary.outcome:
        case Outcome.BETTER | Outcome.WORSE if primary.by_ranks:
            return f"{treatment} is {primary.outcome.value} than {control}, by ranks as runs diverged"
        case Outcome.BETTER | Outcome.WORSE:
            if interval is not None and value < 0:  # that of the size of the difference
                interval = Interval(-interval.high, -interval.low, interval.level)
            size = aligned(abs(value), decimals)
            of_size = "without an interval" if interval is None else aligned_ends(interval, decimals)
            if of_kl:
                where = "nearer to" if value < 0 else "further from"
                return f"{treatment} ends {size} nats {where} the reference than {control}, {of_size}"
            more, theirs = "more" if value > 0 else "less", float(objective(pairs)[:, 1].mean())
            share = f"; {whole_percent(abs(value / theirs))} of J" if abs(theirs) > abs(value) else ""
            return f"{treatment} earns {size} {more} than {control}, {of_size}{share}"
        case Outcome.EQUIVALENT:
            margin = f"±{number(primary.margin)}"
            return f"{treatment} and {control} are equal within {margin}: {shown}, {ends}"
        case Outcome.CANNOT_REJECT:
            return _nothing_to_test([comparison], treatment, control)
        case _ if primary.by_ranks:
            by = "" if primary.doubt else "by ranks "
            return f"It is open whether {treatment} {_aim(comparison)} {control}, {by}as runs diverged"
        case _:
            return f"It is open whether {treatment} {_aim(comparison)} {control}: {shown}, {ends}"
