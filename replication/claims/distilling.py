"""Claims about the credit of distillation in later papers."""

from typing import NamedTuple

from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import DEGENERATE, Evidence
from replication.claims.measure import difference_text, distilled, p_text, with_level
from replication.claims.trained import Trained, better, compared, decidable, designs_of, kl_finding

# Arm of the enumerated study -> arm of the neural sweeps.
_NEURAL = {
    "own token, sampled": "own-sampled",
    "whole future, sampled": "future-sampled",
    "whole future, exact": "future-exact",
    "own token, exact": "own-exact",
}


class _Point(NamedTuple):
    """An arm at a point of the enumerated map or in a sweep, against the control.

    Args:
        arm: The arm, of the enumerated study if it has it.
        where: The point or sweep.
        capacity: "full" if the student can match its teacher.
        text: The ratio of KLs with its p.
        nearer: Whether it ends significantly nearer to the teacher than the control; None if its test cannot
            reject.
    """

    arm: str
    where: str
    capacity: str
    text: str
    nearer: bool | None


def _points(evidence: Evidence, arms: tuple[str, ...], control: str, discounts: bool = False) -> list[_Point]:
    """The arms against a control, at all points and in all sweeps."""
    enumerated = distilled(evidence, control)
    found = [
        _Point(
            arm,
            f"enumerated, {cell}",
            cell.capacity,
            f"{with_level(one.log_ratio.value, one.interval)}, {p_text(one.p_adjusted)}",
            one.log_ratio.value < 0 and one.p_adjusted < 0.05,
        )
        for arm in arms
        for cell, one in zip(evidence.distillation.cells, enumerated[arm], strict=True)
    ]
    neural = [
        (capacity, design)
        for capacity, sweep in evidence.students
        for design in designs_of(
            sweep, *((name, _NEURAL[control]) for name in _labels(sweep, arms, discounts))
        )
    ]
    tests = compared([design for _, design in neural], kl_finding)
    names = {label: arm for arm, label in _NEURAL.items()}
    return found + [
        _Point(
            names.get(label, label),
            sweep.title,
            capacity,
            difference_text(test),
            better(test) if decidable(test) else None,
        )
        for (capacity, (sweep, label, _)), test in zip(neural, tests, strict=True)
    ]


def _labels(trained: Trained, arms: tuple[str, ...], discounts: bool) -> list[str]:
    shown = [name for name in trained.sweep.plan.grid.arms if discounts and name.startswith("discount")]
    return [*(_NEURAL[arm] for arm in arms), *shown]


def _count(points: list[_Point], arm: str, capacity: str) -> tuple[int, int]:
    """At how many points an arm ends nearer, and of how many whose test can reject."""
    own = [one.nearer for one in points if (one.arm, one.capacity) == (arm, capacity)]
    found = [nearer for nearer in own if nearer is not None]
    return sum(found), len(found)


def _rows(points: list[_Point], published: dict[str, str]) -> tuple[Number, ...]:
    return tuple(
        Number(f"KL of “{one.arm}”, {one.where}", published.get(one.arm, "–"), one.text) for one in points
    )


def _too_noisy(evidence: Evidence) -> Ruling:
    sampled, exact = "whole future, sampled", "whole future, exact"
    points = _points(evidence, (sampled, exact, "own token, exact"), "own token, sampled", discounts=True)
    numbers = _rows(points, {sampled: "above 1", exact: "above 1"})
    counts = {
        (arm, capacity): _count(points, arm, capacity)
        for arm in (sampled, exact)
        for capacity in ("full", "limited")
    }
    texts = {key: f"{won} of {total}" for key, (won, total) in counts.items()}
    where = (
        "with a student that can match its teacher, sampled credit for the future ends significantly nearer "
        f"at {texts[sampled, 'full']} points, exact credit at {texts[exact, 'full']}; with one that cannot, "
        f"at {texts[sampled, 'limited']} and {texts[exact, 'limited']}"
    )
    if all(won == 0 for won, _ in counts.values()):
        return Ruling(Status.HOLDS, f"Everywhere: {where}.", numbers)
    if all(won == total for won, total in counts.values()):
        return Ruling(Status.FAILS, f"Nowhere: {where}.", numbers)
    if counts[sampled, "full"][0] == 0 < min(counts[exact, "full"][0], counts[sampled, "limited"][0]):
        return Ruling(
            Status.ONLY_IF,
            f"the credit is sampled, and the student can match its teacher: {where}.",
            numbers,
        )
    return Ruling(Status.INCONCLUSIVE, f"Credit and student do not decide: {where}.", numbers)


def _no_gain(evidence: Evidence) -> Ruling:
    exact = "whole future, exact"
    points = _points(evidence, (exact,), "own token, exact")
    numbers = _rows(points, {exact: "not below 1"})
    useful = [one for one in points if DEGENERATE not in one.where]
    (full, of_full), (limited, of_limited) = (_count(useful, exact, one) for one in ("full", "limited"))
    counts = (
        f"it ends significantly nearer than exact own-token credit at {full} of {of_full} points with a "
        f"student that can match its teacher, and at {limited} of {of_limited} with one that cannot"
    )
    text = (
        f"Their setting, feedback in a model's own context, was not run. With other teachers {counts}; "
        "elsewhere no gain is shown, which is not the same as none."
    )
    everywhere = full + limited == of_full + of_limited
    return Ruling(Status.FAILS if everywhere else Status.INCONCLUSIVE, text, numbers)


def _as_sdpo(evidence: Evidence) -> Ruling:
    return Ruling(
        Status.NOT_TESTABLE,
        "What it says of the sequence's gradient could not be read. The numbers are those for SDPO.",
        _no_gain(evidence).numbers,
    )


def distillation_claims() -> tuple[PublishedClaim, ...]:
    """The claims, oldest first."""
    ran = (
        "`python -m replication study --config replication/configs/studies/distillation_tabular.yaml`; the "
        "sweeps replication/results/distillation_full, distillation_limited and imdb_distill."
    )
    toys = (
        "Theirs: language models that teach themselves, with feedback or demonstrations in the teacher's "
        "context, judged by accuracy. Ours are final KLs to another teacher, of toys: random enumerated "
        "models, and small GPT-2s on the embedded world and on reviews, each arm at the best rate tried for "
        "it. Ratios to exact own-token credit. Self-distillation was not run. In one sweep students lower "
        "the KL by ending completions at once, which is of no use."
    )
    return (
        PublishedClaim(
            "sdft-token-level",
            "SDFT: token-level updates",
            "The reverse KL to the same model with a demonstration in its context is minimised by "
            "token-level updates.",
            Citation(
                "Shenfeld, Damani, Hübotter, Agrawal (2026), Self-Distillation Enables Continual Learning, "
                "arXiv:2601.19897",
                "The abstract and a summary were read (hugocisneros.com).",
            ),
            ran,
            toys,
            _as_sdpo,
        ),
        PublishedClaim(
            "sdpo-no-gain",
            "SDPO: no measurable gain from the sequence's gradient",
            "Of the gradient of the sequence's KL (appendix A.1, equation 8): “did not find measurable gains "
            "relative to its additional complexity”",
            Citation(
                "Hübotter et al. (2026), Reinforcement Learning via Self-Distillation, arXiv:2601.20802",
                "The abstract was read; the passage is quoted second-hand.",
            ),
            ran,
            toys,
            _no_gain,
        ),
        PublishedClaim(
            "opd-sequence-credit-too-noisy",
            "Credit for the sequence is too noisy for distillation",
            "“token-level OPD is biased relative to sequence-level reverse-KL, but it has a much tighter "
            "worst-case variance bound; our toy study shows the same tradeoff empirically, with stronger "
            "future-reward coupling producing higher gradient variance and less stable learning” (abstract)",
            Citation(
                "Fu et al. (2026), Revisiting On-Policy Distillation: Empirical Failure Modes and Simple "
                "Fixes, arXiv:2603.25562",
                "The abstract and sections 1 to 3 were read.",
            ),
            ran,
            "Ratios to the KL of sampled own-token credit, which is what the paper calls token-level; its "
            "credit discounted by γ is sampled, ours (discount-γ) exact. The paper compares gradients' "
            "variance in a toy. Ours are final KLs, of toys too: random enumerated models (30 replicates), "
            "and small GPT-2s on the embedded world and on reviews; each arm at the best rate tried for it "
            "in other runs.",
            _too_noisy,
        ),
    )
