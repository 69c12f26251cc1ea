"""Claims of Amini, Vieira and Cotterell (2025) about training: the frontier and stability."""

from functools import partial

import numpy as np

from analysis.report.matching import match
from analysis.stats.intervals import Interval
from analysis.stats.verdict import Outcome, Verdict as Tested
from replication.audit_share import points_needed, range_text
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import Evidence
from replication.claims.measure import difference_text, p_text, share_text, with_level
from replication.claims.trained import (
    Design,
    better,
    compared,
    decidable,
    kl_finding,
    share_finding,
    worse,
)

_PAPER = (
    "Amini, Vieira, Cotterell (2025), Better Estimation of the KL Divergence Between Language Models, "
    "arXiv:2504.10637"
)
_CODE = "rycolab/kl-rb at 89cd8e065660"
_SUMMARY = Citation(
    _PAPER,
    "The abstract, the introduction and the released code were read; this number only in a summary of the "
    "paper (papernotes.org).",
    _CODE,
)
_CORRECT = ("RaoBlackwell", "MonteCarlo")
# Both with the leave-one-out baseline and with that of other prompts
_RELEASED = [
    tuple(f"{prefix}{name}" for name in _CORRECT)
    for prefix in ("Released", "replication.released.OtherPrompts")
]


def _designs(evidence: Evidence, estimators: tuple[str, ...]) -> list[Design]:
    """Rao-Blackwell against Monte Carlo in all sweeps that have both."""
    found = [(one, one.arm(estimators[0]), one.arm(estimators[1])) for one in evidence.policies]
    return [(one, arm, control) for one, arm, control in found if arm is not None and control is not None]


def _frontier(evidence: Evidence, cut: float, wins: tuple[tuple[int, int], ...], published: str) -> Ruling:
    correct = _designs(evidence, _CORRECT)
    released = [design for pair in _RELEASED for design in _designs(evidence, pair)]
    found = _shares([*correct, *released], cut)
    reached = [design for design, _ in found]
    numbers = [
        Number(f"share of {arm} against {control}: {one.title}", published, "none: an arm has no run there")
        for one, arm, control in (*correct, *released)
        if (one, arm, control) not in reached
    ]
    numbers += [
        Number(f"share of {arm} against {control}: {one.title}", published, share_text(share))
        for (one, arm, control), share in found
    ]
    numbers += [
        Number(f"KL of {arm} over that of {control}: {one.title}", "–", difference_text(ratio))
        for (one, arm, control), ratio in zip(reached, compared(reached, kl_finding), strict=True)
    ]
    numbers += [
        Number(
            f"p if the published share is {k} of {n} points, by pairs with both runs on the frontier",
            "–",
            range_text(k, n),
        )
        for k, n in wins
    ]
    needed = points_needed(wins[0][0] / wins[0][1])
    what = "points needed to show such a share (power 80 %), if no pair has both runs on the frontier"
    numbers.append(Number(what, "–", str(needed)))
    ours, theirs = (
        [share for design, share in found if design in group and decidable(share)]
        for group in (correct, released)
    )
    return Ruling(*_conclusion(ours, theirs), tuple(numbers))


def _shares(designs: list[Design], cut: float) -> list[tuple[Design, Tested]]:
    """The shares of the frontier; a sweep in which an arm has no run there has none, and no test."""
    reached = [
        (one, arm, control)
        for one, arm, control in designs
        if (match(one.sweep, arm, control).kl < cut).any(axis=0).all()
    ]
    return list(zip(reached, compared(reached, partial(share_finding, cut=cut)), strict=True))


def _conclusion(ours: list[Tested], released: list[Tested]) -> tuple[Status, str]:
    baseline = "with a correct leave-one-out baseline"
    above = sum(map(better, ours))
    if ours and above == len(ours):
        return Status.HOLDS, f"In every sweep that can tell, {baseline}."
    share = f"{above} of {len(ours)} shares {'is' if above == 1 else 'are'} significantly above a half"
    if above:
        return Status.ONLY_IF, f"the sweep is one of those below with a significant share: {share}."
    if any(map(better, released)):
        shown = f"{sum(map(better, released))} of {len(released)} sweeps with them"
        return (
            Status.ONLY_IF,
            f"the released estimators are compared, and only in {shown}: {baseline} {share}.",
        )
    if any(map(worse, ours)):
        return Status.FAILS, f"{baseline.capitalize()} {share}."
    return (
        Status.INCONCLUSIVE,
        "No share differs significantly from a half at these numbers of runs, which does not make the "
        "estimators equal.",
    )


def _frontier_78(evidence: Evidence) -> Ruling:
    return _frontier(evidence, np.inf, ((7, 9), (14, 18), (28, 36)), "78 %")


def _frontier_95(evidence: Evidence) -> Ruling:
    return _frontier(evidence, 5.0, ((19, 20), (38, 40)), "95 %")


def _stable(evidence: Evidence) -> Ruling:
    rows, outcomes = [], []
    for one, arm, control in _designs(evidence, _CORRECT):
        if one.numbers["withheld"]:
            continue  # such as of a plan that grew after its results were seen
        for metric in ("reward", "kl"):
            found = one.claim(arm, f"spread_{metric}")
            low, high = found["interval"] or (np.nan, np.nan)
            ends = Interval(low, high, found["level"]) if found["interval"] else None
            cannot = found["outcome"] == Outcome.CANNOT_REJECT.value
            outcomes += [] if cannot else [found["outcome"]]
            rows.append(
                Number(
                    f"spread of the {metric.replace('kl', 'KL')} between replicates, {arm} over {control}: "
                    f"{one.title}",
                    "below 1",
                    f"{with_level(found['estimate'], ends)}, {p_text(found['p_adjusted'])}"
                    + (", cannot reject at this design" if cannot else ""),
                )
            )
    numbers = tuple(rows)
    if outcomes and all(outcome == "better" for outcome in outcomes):
        return Ruling(Status.HOLDS, "Replicates differ significantly less in every sweep.", numbers)
    if any(outcome == "better" for outcome in outcomes):
        return Ruling(Status.ONLY_IF, "the sweep is one of those below with a significant ratio.", numbers)
    if any(outcome == "worse" for outcome in outcomes):
        return Ruling(Status.FAILS, "Replicates differ significantly more where they differ at all.", numbers)
    return Ruling(
        Status.INCONCLUSIVE,
        "No ratio differs significantly from 1 at these numbers of replicates, which does not make the "
        "estimators equally stable.",
        numbers,
    )


def frontier_claims() -> tuple[PublishedClaim, ...]:
    """The claims, in the order of the paper."""
    sweeps = "`python -m analysis report` on the sweeps of replication/results that have both estimators"
    sizes = (
        "The paper: GPT-2 on film reviews, 36 models. Ours: toys, a GPT-2 of a tenth of a million "
        "parameters on generated reviews (embedded world) and one of 3.4 million on real ones; and "
        "SmolLM2-135M, of the paper's size, 160 runs of eight steps with an adapter; all runs "
        "are scored by one evaluator. The plans were locked before; that at twice the rate was changed "
        "when its released pair was refused."
    )
    share = (
        f"{sizes} MonteCarlo and RaoBlackwell have the correct leave-one-out baseline. The released "
        "estimators leave the KL inside the advantage undetached, as the paper's code does; in the sweep at "
        "twice the rate they have its baseline, too, which is one of other prompts. How many points the "
        "published share is of is not known to us, and it decides whether chance gives as much. "
        "A share of the frontier also rewards spread, and below a KL it rewards a small KL. A sweep in "
        "which an arm has no run on this part has no share, and is left out of the correction too; one that "
        "cannot reject after that correction counts for no verdict."
    )
    return (
        PublishedClaim(
            "frontier-78",
            "78 % of the Pareto frontier",
            "Of the points on the frontier of reward and KL, 78 % are models trained with RB and 22 % with "
            "MC.",
            _SUMMARY,
            f"{sweeps}; `python -m replication audit --share 7/9`.",
            share,
            _frontier_78,
        ),
        PublishedClaim(
            "frontier-95",
            "95 % of the frontier below a KL of 5",
            "In the region KL < 5, models trained with RB are 95 % of the frontier.",
            _SUMMARY,
            f"{sweeps}; `python -m replication audit --share 19/20`.",
            share,
            _frontier_95,
        ),
        PublishedClaim(
            "rb-more-stable-training",
            "Training with the Rao-Blackwell gradient is more stable",
            "“a Rao–Blackwellized estimator of the gradient of the KL divergence, which leads to more stable "
            "training” (abstract)",
            Citation(_PAPER, "The abstract was read.", _CODE),
            f"{sweeps}.",
            f"{sizes} Ours: the standard deviation between replicates at equal steps, averaged over the run. "
            "A sweep whose plan grew after its results were seen has no verdict, and is left out.",
            _stable,
        ),
    )
