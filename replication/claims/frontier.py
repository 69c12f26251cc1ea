"""Claims of Amini, Vieira and Cotterell (2025) about training: the frontier and stability."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import optimize

from analysis.report.matching import match
from analysis.stats.frontier import Share, pooled_share
from analysis.stats.intervals import Interval
from analysis.stats.pairs import Pairs
from analysis.stats.text import number
from analysis.stats.verdict import Outcome, Verdict as Tested
from replication.audit_share import points_needed, range_text
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import Evidence
from replication.claims.measure import count_text, difference_text, p_text, with_level
from replication.claims.trained import Design, compared, objective_finding

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


class _Shared(NamedTuple):
    """A sweep's share of the frontier, and what a published share would need."""

    design: Design
    share: Share
    objective: Tested  # the difference in J
    needed: float  # the reward, at equal KL, with which the published share would be seen on average

    @property
    def excluded(self) -> bool:
        """Whether the interval of J excludes that."""
        interval = self.objective.interval
        return interval is not None and interval.high < self.needed < math.inf


def _frontier(evidence: Evidence, cut: float, wins: tuple[tuple[int, int], ...], published: str) -> Ruling:
    correct = _designs(evidence, _CORRECT)
    released = [design for pair in _RELEASED for design in _designs(evidence, pair)]
    target = wins[0][0] / wins[0][1]
    ours, theirs = (_shares(designs, cut, target) for designs in (correct, released))
    reached = [one.design for one in (*ours, *theirs)]
    numbers = [
        Number(f"share of {arm} against {control}: {one.title}", published, "none: an arm has no run there")
        for one, arm, control in (*correct, *released)
        if (one, arm, control) not in reached
    ]
    for found in (*ours, *theirs):
        one, arm, control = found.design
        row = f"{arm} against {control}: {one.title}"
        numbers += [
            Number(f"share of {row}", published, count_text(found.share.count, found.share.total)),
            Number(f"J of {row}", "–", difference_text(found.objective)),
            Number(f"reward at equal KL that such a share needs: {row}", "–", number(found.needed)),
        ]
    numbers += [
        Number(
            f"p if the published share is {k} of {n} points, by pairs with both runs on the frontier",
            "–",
            range_text(k, n),
        )
        for k, n in wins
    ]
    what = "points needed to show such a share (power 80 %), if no pair has both runs on the frontier"
    numbers.append(Number(what, "–", str(points_needed(target))))
    return Ruling(*_conclusion(ours, published), tuple(numbers))


def _shares(designs: list[Design], cut: float, target: float) -> list[_Shared]:
    """The shares of the frontier; a sweep in which an arm has no run there has none."""
    reached = [
        (one, arm, control)
        for one, arm, control in designs
        if (match(one.sweep, arm, control).kl < cut).any(axis=0).all()
    ]
    tests = compared(reached, objective_finding)
    pairs = [match(one.sweep, arm, control) for one, arm, control in reached]
    return [
        _Shared(design, pooled_share(own, cut), test, _needed(own, cut, target))
        for design, own, test in zip(reached, pairs, tests, strict=True)
    ]


def _needed(pairs: Pairs, cut: float, target: float) -> float:
    """The reward at equal KL with which a share is as large on average, from the spread of these runs.

    Infinite where runs of the control with a low KL are on the frontier whatever the reward.

    The arms' labels are exchanged at random within pairs, as if arms did not matter, and the reward is added
    to that of the treatment.
    """
    rng, draws = np.random.default_rng(0), 200
    turned = rng.random((draws, len(pairs))) < 0.5

    def lacks(reward: float) -> float:
        shares = []
        for mask in turned:
            kl, own = (np.where(mask[:, None], both[:, ::-1], both) for both in (pairs.kl, pairs.reward))
            lifted = own + np.array([reward, 0.0])
            shares.append(pooled_share(replace(pairs, kl=kl, reward=lifted), cut).value)
        return target - float(np.nanmean(shares))

    most = 10 * float(np.ptp(pairs.reward))
    return float(optimize.brentq(lacks, 0.0, most, xtol=1e-3)) if lacks(most) < 0 else math.inf


def _conclusion(ours: list[_Shared], published: str) -> tuple[Status, str]:
    excluded = [one for one in ours if one.excluded]
    text = (
        "A share is a count of runs, and an arm's spread raises it, too: nothing is tested by it. With a "
        f"correct leave-one-out baseline the interval of J excludes the reward at equal KL that {published} "
        f"would need in {len(excluded)} of {len(ours)} sweeps"
    )
    if ours and len(excluded) == len(ours):
        return Status.FAILS, f"{text}."
    names = "; ".join(f"{one.design[0].title}, {number(one.needed)}" for one in excluded)
    return Status.INCONCLUSIVE, f"{text}{f' ({names})' if names else ''}; the others leave it open."


def _frontier_78(evidence: Evidence) -> Ruling:
    return _frontier(evidence, np.inf, ((7, 9), (14, 18), (28, 36)), "78 %")


def _frontier_95(evidence: Evidence) -> Ruling:
    return _frontier(evidence, 5.0, ((19, 20), (38, 40)), "95 %")


def _stable(evidence: Evidence) -> Ruling:
    rows, outcomes = [], []
    for one, arm, control in _designs(evidence, _CORRECT):
        if one.numbers["withheld"]:
            continue  # such as of a plan that grew after its results were seen
        found = one.claim(arm, "spread")
        low, high = found["interval"] or (np.nan, np.nan)
        ends = Interval(low, high, found["level"]) if found["interval"] else None
        cannot = found["outcome"] == Outcome.CANNOT_REJECT.value
        outcomes += [] if cannot else [found["outcome"]]
        rows.append(
            Number(
                f"spread of J between replicates, {arm} over {control}: {one.title}",
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
    sweeps = "`lit-klrb report` on the sweeps of replication/results that have both estimators"
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
        "A sweep in which an arm has no run on this part has no share."
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
            f"{sizes} Ours: the spread between replicates of J at the end of training. "
            "A sweep whose plan grew after its results were seen has no verdict, and is left out.",
            _stable,
        ),
    )
