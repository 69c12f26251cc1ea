"""A sweep with its comparisons, from which all sections are built, and its answer in one sentence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.checks import load_sweep
from analysis.report.matching import match, start_of, tuned_arms
from analysis.results.records import OBJECTIVE
from analysis.results.sweep import Sweep
from analysis.stats import Comparison, Outcome, Pairs, Rules, Verdict, compare
from analysis.stats.comparison import primary_verdicts
from analysis.stats.intervals import Interval
from analysis.stats.text import aligned, aligned_ends, count, decimals_of, number, with_ends
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
    withheld, primary = _withheld(sweep, designs), plan.primary
    margin = primary.margins.get(primary.outcome)
    rules = Rules(primary.alpha, margin, primary.outcome, len(plan.comparisons), withheld, tuned_arms(sweep))
    comparisons = compare(designs, rules)
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
    verdicts = primary_verdicts([pairs for pairs in designs if len(pairs)], rules)
    outcomes = "; ".join(f"{one.treatment} against {one.control} {one.outcome.value}" for one in verdicts)
    return (
        f"If {count(len(lost), 'lost run')} had been as the best of their β for {control}, and as the worst "
        f"for other arms (the reverse where an arm is worse), the verdict would be: {outcomes}."
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


def title_of(assessment: Assessment) -> str:
    """The conclusion with its numbers; the arms alone if there is no verdict."""
    plan, comparisons = assessment.sweep.plan, assessment.comparisons
    control, others = plan.primary.control, plan.comparisons
    if assessment.withheld or not comparisons:
        if len(others) > 2:
            return f"{len(others)} arms against {control}"
        return f"{' and '.join(others)} against {control}" if others else f"{control} alone"
    if all(one.pairs.diverged.all() for one in comparisons):
        return f"All runs of {', '.join(others)} and {control} diverged"
    best = max(comparisons, key=_favourable)
    if len(comparisons) == 1 or best.primary.outcome is Outcome.BETTER:
        return f"{_of_one(best.primary)}{_from(assessment, best.primary)}"
    arms, outcomes = f"{len(comparisons)} arms", {one.primary.outcome for one in comparisons}
    text = f"It is open whether any of {arms} {_aim(best.primary)} {control}"
    words = {Outcome.WORSE: "worse than", Outcome.EQUIVALENT: "equivalent to"}
    if len(outcomes) == 1 and (same := words.get(best.primary.outcome)):
        text = f"Each of {arms} is {same} {control}"
    elif outcomes <= words.keys():  # what is open may be better
        text = f"No arm of {len(comparisons)} is better than {control}"
    elif outcomes == {Outcome.NO_VERDICT}:
        text = f"Each of {arms} does the same as {control}"
    elif outcomes == {Outcome.CANNOT_REJECT}:
        text = f"These runs are too few to tell any of {arms} from {control}"
    return f"{text}{_from(assessment, best.primary)}"


def sentence_of(assessment: Assessment) -> str:
    """The answer for a terminal: the title of the page, or why there is no verdict."""
    title = title_of(assessment)
    return f"{title}: no verdict, {assessment.withheld}" if assessment.withheld else title


def meaning_of(assessment: Assessment) -> Iterator[str]:
    """What the title's numbers are, in sentences."""
    if not assessment.comparisons:
        return
    first = assessment.comparisons[0]
    prompts = None if first.pairs.prompts is None else first.pairs.prompts.shape[1]
    of = f"the {count(prompts, 'prompt')} that were" if prompts else "the prompts that were"
    if assessment.withheld:
        yield f"The intervals of this page are over seeds, for {of} evaluated."
        return
    by_kl = first.primary.claim.key == schema.KL
    yield (
        "The KL to the reference decides, in nats per completion; lower is better."
        if by_kl
        else "J = reward − β·KL is what training maximises."
    )
    yield (
        f"Differences are means over β of matched runs. The intervals of this answer are "
        f"{level_of(first.primary)}, over seeds, for {of} evaluated."
    )
    if narrow := [one.pairs.treatment for one in assessment.comparisons if _of_these_prompts(one.primary)]:
        yield f"Over seeds and prompts, {' and '.join(narrow)} may be as good as the control: see the table."
    ranked = [one.pairs.treatment for one in assessment.comparisons if one.primary.by_ranks]
    if ranked:
        yield f"Those of {', '.join(ranked)} are of ranks, as runs diverged."
    if margin := first.primary.margin:
        within = [one.pairs.treatment for one in assessment.comparisons if _less(one.primary, margin)]
        less = f"; {' and '.join(within)} by less than it" if within else ""
        yield f"The planned margin is ±{number(margin)}{less}."
    for one in assessment.comparisons:
        if one.primary.outcome is Outcome.INCONCLUSIVE and (reach := one.primary.detectable) is not None:
            these = f"These {count(len(one.pairs), 'pair')} of {one.pairs.treatment}"
            yield f"{these} would have shown {number(reach)} or more (80 % power)."


def level_of(verdict: Verdict) -> str:
    """The level of the intervals of a page."""
    return f"{100 * (1 - verdict.level):.5g} %"


def _of_these_prompts(verdict: Verdict) -> bool:
    """Whether a difference is clear on the prompts that were evaluated, and not on others like them."""
    both = verdict.over_prompts and verdict.over_prompts.interval(1 - verdict.level)
    clear = verdict.outcome in (Outcome.BETTER, Outcome.WORSE)
    return bool(clear and both and both.low <= 0 <= both.high)


def _less(verdict: Verdict, margin: float) -> bool:
    """Whether a difference is clear, and smaller than the planned margin."""
    return verdict.outcome in (Outcome.BETTER, Outcome.WORSE) and abs(verdict.estimate.value) < margin


def _favourable(comparison: Comparison) -> tuple[bool, bool, float]:
    """The key by which the best comparison is the largest; differences of ranks are not those of values."""
    primary = comparison.primary
    sign = 1 if primary.claim.higher_is_better else -1
    return primary.outcome is Outcome.BETTER, not primary.by_ranks, sign * primary.estimate.value


def _aim(verdict: Verdict) -> str:
    """What a better arm does."""
    if verdict.by_ranks:
        return "is better than"
    return "has a lower KL than" if verdict.claim.key == schema.KL else "has a higher J than"


def _of_one(verdict: Verdict) -> str:
    treatment, control, value = verdict.treatment, verdict.control, verdict.estimate.value
    by_kl = verdict.claim.key == schema.KL
    symbol, unit = ("KL", " nats") if by_kl else ("J", "")
    interval = verdict.interval
    decimals = decimals_of([value, *(interval.ends if interval else ())])
    level = f"{level_of(verdict)} interval"
    ends = f"{level} {aligned_ends(interval, decimals)}" if interval else "no interval"
    match verdict.outcome:
        case Outcome.NO_VERDICT:
            return f"{treatment} and {control} do the same: no run differs from the one it is paired with"
        case Outcome.BETTER | Outcome.WORSE if verdict.by_ranks:
            return f"{treatment} is {verdict.outcome.value} than {control}, by ranks as runs diverged"
        case Outcome.BETTER | Outcome.WORSE:
            if interval is not None and value < 0:  # that of the size of the difference
                turned = Interval(-interval.high, -interval.low, interval.level)
                ends = f"{level} {aligned_ends(turned, decimals)}"
            size, side = aligned(abs(value), decimals), "higher" if value > 0 else "lower"
            return f"{treatment}: {symbol} {size}{unit} {side} than {control} ({ends})"
        case Outcome.EQUIVALENT:
            margin = f"±{number(verdict.margin)}"
            shown = aligned(value, decimals, sign=True)
            return f"{treatment}: {symbol} equal to that of {control} within {margin} ({shown}, {ends})"
        case Outcome.CANNOT_REJECT:
            return f"These runs are too few to tell {treatment} from {control}"
        case _ if verdict.by_ranks:
            by = "" if verdict.doubt else "by ranks "
            return f"It is open whether {treatment} {_aim(verdict)} {control}, {by}as runs diverged"
        case _:
            shown = aligned(value, decimals, sign=True)
            return f"It is open whether {treatment} {_aim(verdict)} {control}: {shown}{unit} ({ends})"


def _from(assessment: Assessment, verdict: Verdict) -> str:
    """What the control gained in training, and where it started."""
    by_kl, gain = verdict.claim.key == schema.KL, verdict.gain
    if verdict.by_ranks:
        return ""
    if gain is None:
        return f"; what {verdict.control} gained in training is unknown"
    interval = gain.interval(1 - verdict.level)
    decimals = decimals_of([gain.value, *(interval.ends if interval else ())])
    start = start_of(assessment.sweep)[schema.KL if by_kl else OBJECTIVE]
    did = "lowered it by" if by_kl else "gained"
    of = "" if start is None else f" from {aligned(start, decimals)} at the start"
    return f"; {verdict.control} {did} {with_ends(gain.value, interval)}{of}"
