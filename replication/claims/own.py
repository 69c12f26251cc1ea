"""Claims of this package, judged like those of others."""

from replication.artifacts import OffPolicyArtifact
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import INNER_STEPS, Evidence
from replication.claims.measure import ROUNDING, difference_text, mean_text, objective_rows
from replication.claims.trained import (
    better,
    compared,
    decidable,
    designs_of,
    kl_finding,
    objective_finding,
    objectives,
    worse,
)

_DEFAULT = "RaoBlackwellControlVariate"
_CANNOT = "No comparison can reject after correction, whatever its runs show."
# Its arm of that name has an earlier estimator, with a single coefficient.
_EARLIER = "imdb_small"


def _default_on_reviews(evidence: Evidence) -> Ruling:
    found = {
        one.title: (one, objectives(one)[arm])
        for name, one in evidence.sweeps.items()
        if one.title.startswith("reviews") and name != _EARLIER
        if (arm := one.arm(_DEFAULT)) is not None
    }
    numbers = tuple(
        row for one, _ in found.values() for row in objective_rows(one, [one.arm(_DEFAULT)], "above 0")
    )
    found = {title: one for title, one in found.items() if decidable(one[1])}
    higher, lower = ([title for title, (_, test) in found.items() if side(test)] for side in (better, worse))
    if not found:
        return Ruling(Status.INCONCLUSIVE, _CANNOT, numbers)
    if len(higher) == len(found):
        return Ruling(Status.HOLDS, "In every comparison on reviews that can tell.", numbers)
    if not higher:
        return Ruling(Status.FAILS, "In no comparison on reviews.", numbers)
    elsewhere = f"it ends significantly lower in {len(lower)} of {len(found) - len(higher)}"
    return Ruling(
        Status.ONLY_IF,
        f"models, β and rates are those of: {'; '.join(higher)}. Elsewhere {elsewhere}"
        + (f" ({'; '.join(lower)})." if lower else "."),
        numbers,
    )


def _prefix_rewards(evidence: Evidence) -> Ruling:
    arms = ("prefix", "prefix-8", "prefix-one", "prefix-two", "prefix-four")
    pairs = [(arm, "mc") for arm in arms]
    designs = [design for one in evidence.policies for design in designs_of(one, *pairs)]
    tests = compared(designs, objective_finding)
    numbers = tuple(
        Number(f"J of {arm} minus that of {control}, {one.title}", "above 0", difference_text(test))
        for (one, arm, control), test in zip(designs, tests, strict=True)
    )
    if not any(map(decidable, tests)):
        return Ruling(Status.INCONCLUSIVE, _CANNOT, numbers)
    designs = [design for design, test in zip(designs, tests, strict=True) if decidable(test)]
    tests = [test for test in tests if decidable(test)]
    higher, lower = ([*map(side, tests)] for side in (better, worse))
    if all(higher):
        return Ruling(Status.HOLDS, "In every comparison that can tell.", numbers)
    if any(lower) or not any(higher):
        return Ruling(Status.FAILS, "It ends significantly lower, or nowhere higher.", numbers)
    where = "; ".join(
        f"{one.title} ({arm})" for (one, arm, _), found in zip(designs, higher, strict=True) if found
    )
    return Ruling(
        Status.ONLY_IF,
        f"places, warm starts, β and rates are those of: {where}. Elsewhere it is not found higher or lower.",
        numbers,
    )


def _annealed(evidence: Evidence) -> Ruling:
    arm, others = "discount-annealed", ("own-exact", "future-exact")
    designs = [
        design
        for _, one in evidence.students
        for design in designs_of(one, *((arm, other) for other in others))
    ]
    tests = compared(designs, kl_finding)
    numbers = tuple(
        Number(f"KL of {arm} over that of {other}, {one.title}", "below 1", difference_text(test))
        for (one, _, other), test in zip(designs, tests, strict=True)
    )
    by_sweep: dict[str, list[bool]] = {}
    for (sweep, *_), test in zip(designs, tests, strict=True):
        if decidable(test):
            by_sweep.setdefault(sweep.title, []).append(better(test))
    if not by_sweep:
        return Ruling(Status.INCONCLUSIVE, _CANNOT, numbers)
    won = {title: all(found) for title, found in by_sweep.items()}
    best = [title for title, all_of_them in won.items() if all_of_them]
    if len(best) == len(won):
        return Ruling(
            Status.HOLDS,
            f"It ends significantly nearer than both in all {len(won)} sweeps that can tell.",
            numbers,
        )
    if not best:
        return Ruling(
            Status.FAILS,
            f"In none of {len(won)} sweeps that can tell does it end significantly nearer than both.",
            numbers,
        )
    return Ruling(
        Status.ONLY_IF,
        f"teacher, student and number of steps are those of: {'; '.join(best)}. In the other "
        f"{len(won) - len(best)} of {len(won)} sweeps that can tell it is not found nearer than both.",
        numbers,
    )


def _worst_bias(artifact: OffPolicyArtifact, correction: str) -> float:
    return max(
        float(by_correction[correction][term].bias.max())
        for by_correction in artifact.moments.values()
        for term in ("kl", "objective")
    )


def _off_policy(evidence: Evidence) -> Ruling:
    artifact = evidence.off_policy
    last = artifact.steps[-1]
    numbers = tuple(
        Number(
            f"bias of {name}, {correction}, after {last} inner steps",
            "0" if correction in ("prefix", "sequence") else "–",
            mean_text(by_correction[correction]["kl"].bias[:, -1]),
        )
        for name, by_correction in artifact.moments.items()
        for correction in by_correction
    )
    for one in [evidence.sweeps[INNER_STEPS]] if INNER_STEPS in evidence.sweeps else []:
        numbers += tuple(objective_rows(one, one.sweep.plan.comparisons))
    unbiased = [name for name in ("prefix", "sequence") if _worst_bias(artifact, name) < ROUNDING]
    if len(unbiased) == 2:
        return Ruling(
            Status.HOLDS,
            "Of the KL and of the whole objective, in every model and at every inner step.",
            numbers,
        )
    if unbiased:
        return Ruling(Status.ONLY_IF, f"the weights are those of the {unbiased[0]}.", numbers)
    return Ruling(Status.FAILS, "Both kinds of weights are biased.", numbers)


def own_claims() -> tuple[PublishedClaim, ...]:
    """The claims."""
    read = "A claim of this package, judged by the same rules as those of others."
    return (
        PublishedClaim(
            "own-default-on-reviews",
            "The default ends above Monte Carlo on real reviews",
            "On real reviews J is 4.71 with RaoBlackwellControlVariate, 3.58 with Monte Carlo.",
            Citation("This package, docs/results.md, lit_klrb", read),
            "The sweeps replication/results/imdb_noise, imdb_night, imdb_night_equal and smollm2_reviews.",
            "One reference, reward model and DPO checkpoint for each sweep, small models, short runs. Rates "
            "come from one or two runs each, which no interval contains. What is removed is mostly the "
            "reward's noise, by DPO's token values and a shrunken baseline that MonteCarlo lacks.",
            _default_on_reviews,
        ),
        PublishedClaim(
            "own-prefix-rewards",
            "Prefix rewards end above Monte Carlo on SmolLM2's reviews",
            "On SmolLM2's reviews J is 3.71 with prefix_rewards, against Monte Carlo's 1.90, with the same "
            "samples and 16 reward calls per answer instead of one.",
            Citation("This package, docs/results.md, lit_klrb", read),
            "The sweeps smollm2_reviews, _samples, _starts, _rates, _parts, _places and _learned in "
            "replication/results.",
            "One model, and two rewards that say much of unfinished completions and have no limit: a "
            "function of words, and in the last sweep a classifier on hidden states; eight steps.",
            _prefix_rewards,
        ),
        PublishedClaim(
            "own-annealed-discount",
            "A discount from 0 to 1 over the run distils better than either",
            "On reviews `RaoBlackwell` ends at 21.9 nats with a discount from 0 to 1, at 25.9 without.",
            Citation("This package, docs/results.md and docs/distillation.md, lit_klrb", read),
            "The sweeps replication/results/distillation_full, distillation_limited and imdb_distill.",
            "Each arm at the best rate tried for it, of one run each; short runs, none of which has "
            "converged on reviews.",
            _annealed,
        ),
        PublishedClaim(
            "own-off-policy",
            "Weights of the prefix, or of the sequence, give the off-policy gradient without bias",
            "`off_policy: prefix` stays exact over several optimizer steps per rollout. Shah et al. "
            "(arXiv:2512.21852) leave “an unbiased sequence level reverse KL gradient estimate in off-policy "
            "settings for future work.”",
            Citation("This package, docs/choosing.md, lit_klrb", read),
            "`python -m replication study --config replication/configs/studies/off_policy.yaml`; the sweep "
            "replication/results/off_policy.",
            "Toys: random enumerated models with inner steps along the exact gradient; in training a small "
            "GPT-2, each arm at the best rate tried for it, where an unbiased gradient need not end best.",
            _off_policy,
        ),
    )
