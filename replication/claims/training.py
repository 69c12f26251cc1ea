"""Claims about baselines and importance weights in later papers."""

import numpy as np

from analysis.results.artifacts import FloatArray
from analysis.stats.text import number
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import INNER_STEPS, Evidence
from replication.claims.measure import ROUNDING, difference_text, mean_text
from replication.claims.trained import compared, designs_of, objective_finding

_IDENTITIES = "`python -m replication study --config replication/configs/studies/identities.yaml`"


def _token_baseline(evidence: Evidence) -> Ruling:
    found = evidence.identities["token_baseline"]
    titles = {"row_per_prefix": "tokens without shared parameters", "one_row": "all parameters shared"}
    numbers = tuple(
        Number(
            f"variance relative to the mean reward as baseline, {kind} norm, {titles[case]}",
            "–",
            mean_text(values),
        )
        for case, by_kind in found.items()
        for kind, values in by_kind.items()
    )
    ratios = {case: np.array(by_kind["cumulative"]) for case, by_kind in found.items()}
    own = np.array(found["row_per_prefix"]["own"])
    if all((values <= 1 + 1e-9).all() for values in ratios.values()):
        if (ratios["row_per_prefix"] <= own + 1e-9).all():
            return Ruling(Status.HOLDS, "It has less variance, and nothing examined has less.", numbers)
        return Ruling(
            Status.ONLY_IF,
            "“optimal” means better than the mean reward: it is, in every model, but without shared "
            "parameters the norm of the token alone is better than the cumulative one.",
            numbers,
        )
    worse, total = (sum(int(f(values)) for values in ratios.values()) for f in (_count_above_1, len))
    return Ruling(
        Status.ONLY_IF,
        f"the mean over models is meant: in {worse} of {total} it has more variance than the mean reward. "
        "Without shared parameters, the norm of the token alone is better than the cumulative one.",
        numbers,
    )


def _count_above_1(values: FloatArray) -> int:
    return int((values > 1).sum())


def _prefix_ratios(evidence: Evidence) -> Ruling:
    artifact = evidence.off_policy
    numbers = []
    strictly, worst = True, 0.0
    for name, by_correction in artifact.moments.items():
        prefix, sequence = by_correction["prefix"]["kl"], by_correction["sequence"]["kl"]
        worst = max(worst, float(prefix.bias.max()))
        ratios = (prefix.noise[:, 1:] / sequence.noise[:, 1:]) ** 2
        smaller = int((ratios < 1).sum())
        strictly = strictly and smaller == ratios.size
        numbers += [
            Number(
                f"{name}: largest bias of prefix weights", "0", number(worst if worst > ROUNDING else 0.0)
            ),
            Number(
                f"{name}: variance of prefix over sequence weights, last step",
                "below 1",
                mean_text(ratios[:, -1]),
            ),
            Number(f"{name}: cases with less variance", "all", f"{smaller} of {ratios.size}"),
        ]
    numbers += _trained_ratios(evidence)
    if worst > ROUNDING:
        return Ruling(Status.FAILS, "Prefix weights are biased.", tuple(numbers))
    if strictly:
        return Ruling(Status.HOLDS, "In every model and at every inner step.", tuple(numbers))
    return Ruling(
        Status.ONLY_IF,
        "the variance is that of the ratio or of one token's term, for which it follows from the "
        "conditional expectation. Gradients with it are unbiased, but their variance, summed over the "
        "sequence, is not smaller than with sequence weights in every model.",
        tuple(numbers),
    )


def _trained_ratios(evidence: Evidence) -> list[Number]:
    """What training with prefix ratios ends at, against the other ones."""
    if INNER_STEPS not in evidence.sweeps:
        return []
    others = ("sequence", "token", "clip", "none")
    designs = designs_of(evidence.sweeps[INNER_STEPS], *(("prefix", other) for other in others))
    return [
        Number(f"J with prefix ratios minus that with {other}, {one.title}", "–", difference_text(found))
        for (one, _, other), found in zip(designs, compared(designs, objective_finding), strict=True)
    ]


def _shrinkage(evidence: Evidence) -> Ruling:
    found = evidence.identities["shrinkage"]
    numbers = tuple(
        Number(
            f"mean squared error of the baseline relative to leave-one-out, {case}",
            "below 1",
            f"{number(one['ratio'])} ± {number(one['standard_error'], 2)}",
        )
        for case, one in found.items()
    )
    lower = sum(one["ratio"] + 2 * one["standard_error"] < 1 for one in found.values())
    higher = sum(one["ratio"] - 2 * one["standard_error"] > 1 for one in found.values())
    worst = max(one["ratio"] for one in found.values()) - 1
    text = (
        "As released, the baseline's error is below leave-one-out's by more than two standard errors in "
        f"{lower} of {len(found)} cases, and above it in {higher}, by {worst:.0%} at most, where prompts' "
        "means are far apart; a gradient's variance was not measured, nor was the proof read."
    )
    one_way = Status.FAILS if higher else Status.HOLDS
    return Ruling(Status.INCONCLUSIVE if higher and lower else one_way, text, numbers)


def later_training() -> tuple[PublishedClaim, ...]:
    """The claims, oldest first."""
    return (
        PublishedClaim(
            "shrinkage-baselines",
            "Shrinkage baselines provably lower the variance",
            "“we construct a shrinkage-based baseline that provably yields lower-variance policy-gradient "
            "estimators across algorithms” (abstract)",
            Citation(
                "Zeng, Zhou, Arora, Zanette (2025), Shrinking the Variance, arXiv:2511.03710",
                "The abstract and the authors' code (guanning03/JSPO-Official, commit 3f8539d) were read.",
            ),
            _IDENTITIES,
            "Simulated normal rewards, 8 prompts a batch, 4,000 batches; prompts' means with standard "
            "deviation 0, 0.5 and 3 times that within prompts.",
            _shrinkage,
        ),
        PublishedClaim(
            "optimal-token-baseline",
            "The optimal token baseline",
            "“we derive the Optimal Token Baseline (OTB) from first principles, proving that gradient "
            "updates should be weighted inversely to their cumulative gradient norm” (abstract)",
            Citation(
                "Li et al. (2026), The Optimal Token Baseline, arXiv:2602.07078",
                "The abstract was read. Not examined: the proxy by logits, and training.",
            ),
            _IDENTITIES,
            "Random enumerated models and rewards; expectations in the baseline are exact, where the paper "
            "estimates them from a group.",
            _token_baseline,
        ),
        PublishedClaim(
            "ctpo-prefix-ratios",
            "CTPO: prefix ratios are unbiased and vary strictly less",
            "“this ratio provides an unbiased prefix correction for each token-level gradient term and has "
            "strictly lower variance than the full sequence ratio” (abstract)",
            Citation(
                "Zhang et al. (2026), Rethinking Importance Sampling in LLM Policy Optimization: A "
                "Cumulative Token Perspective, arXiv:2605.07331",
                "The abstract was read, and a summary of its propositions.",
                "horizon-llm/CTPO (only its README was read)",
            ),
            "`python -m replication study --config replication/configs/studies/off_policy.yaml`",
            "The paper: rewards of sequences, with clipping by position. Ours, all toys: the gradient of "
            "the KL, without clipping, on random enumerated models after 1 to 8 inner steps; in training "
            "reward and KL, each arm at the best rate tried for it.",
            _prefix_ratios,
        ),
    )
