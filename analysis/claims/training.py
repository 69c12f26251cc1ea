"""Claims about baselines, importance weights and distillation in later papers."""

import numpy as np

from analysis.claims.claim import Number, PublishedClaim, Ruling, Source, Verdict
from analysis.claims.evidence import Evidence
from analysis.claims.measure import ROUNDING, distilled, mean_text, p_text, ratio_text
from analysis.results.arrays import FloatArray
from analysis.stats.text import number

_IDENTITIES = "`python -m lit_klrb study --config configs/studies/identities.yaml`"


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
            return Ruling(Verdict.HOLDS, "It has less variance, and nothing examined has less.", numbers)
        return Ruling(
            Verdict.ONLY_IF,
            "“optimal” means better than the mean reward: it is, in every model, but without shared "
            "parameters the "
            "norm of the token alone is better than the cumulative one.",
            numbers,
        )
    worse, total = (sum(int(f(values)) for values in ratios.values()) for f in (_count_above_1, len))
    return Ruling(
        Verdict.ONLY_IF,
        f"the mean over models is meant: in {worse} of {total} it has more variance than the mean reward. "
        "Without "
        "shared parameters, the norm of the token alone is better than the cumulative one.",
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
    if worst > ROUNDING:
        return Ruling(Verdict.FAILS, "Prefix weights are biased.", tuple(numbers))
    if strictly:
        return Ruling(Verdict.HOLDS, "In every model and at every inner step.", tuple(numbers))
    return Ruling(
        Verdict.ONLY_IF,
        "the variance is that of each token's term, for which it follows from the conditional expectation: "
        "unbiased "
        "it is, but the sum over a sequence has more variance than with sequence weights in some models.",
        tuple(numbers),
    )


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
    lower = {case: one["ratio"] + 2 * one["standard_error"] < 1 for case, one in found.items()}
    higher = [case for case, one in found.items() if one["ratio"] - 2 * one["standard_error"] > 1]
    if all(lower.values()):
        return Ruling(Verdict.HOLDS, "In every case examined.", numbers)
    if not any(lower.values()):
        return Ruling(Verdict.FAILS, "In no case examined.", numbers)
    return Ruling(
        Verdict.ONLY_IF,
        "prompts have similar mean rewards, or the coefficient is known: with means far apart, the estimated "
        f"coefficient costs a few per cent ({len(higher)} of {len(found)} cases).",
        numbers,
    )


def _too_noisy(evidence: Evidence) -> Ruling:
    control = "own token, sampled"
    arms = distilled(evidence, control)
    numbers, wins = [], {}
    for arm in ("whole future, sampled", "whole future, exact", "own token, exact"):
        wins[arm] = [one.log_ratio.value < 0 and one.p_holm < 0.05 for one in arms[arm]]
        numbers += [
            Number(
                f"KL of “{arm}” over that of “{control}”, {cell}",
                "above 1" if arm.startswith("whole") else "–",
                f"{ratio_text(one.log_ratio)}, {p_text(one.p_holm)}",
            )
            for cell, one in zip(evidence.distillation.cells, arms[arm], strict=True)
        ]
    sampled, exact = wins["whole future, sampled"], wins["whole future, exact"]
    if not any(sampled) and not any(exact):
        return Ruling(
            Verdict.HOLDS, "Credit for the future ends no nearer to the teacher anywhere.", tuple(numbers)
        )
    if all(sampled) and all(exact):
        return Ruling(
            Verdict.FAILS, "Credit for the future ends nearer to the teacher everywhere.", tuple(numbers)
        )
    return Ruling(
        Verdict.ONLY_IF,
        "credit is sampled and the student can match the teacher: exact credit for the future is better "
        "than sampled "
        f"own-token credit at {sum(exact)} of {len(exact)} points of the map, sampled credit at "
        f"{sum(sampled)}.",
        tuple(numbers),
    )


def later_training() -> tuple[PublishedClaim, ...]:
    """The claims, oldest first."""
    return (
        PublishedClaim(
            "shrinkage-baselines",
            "Shrinkage baselines provably lower the variance",
            "“we construct a shrinkage-based baseline that provably yields lower-variance policy-gradient "
            "estimators "
            "across algorithms” (abstract)",
            Source(
                "Zeng, Zhou, Arora, Zanette (2025), Shrinking the Variance, arXiv:2511.03710",
                "The abstract was read, not the estimator of the coefficient: ours is a moment estimate.",
            ),
            _IDENTITIES,
            "Simulated normal rewards, 8 prompts a batch, 4,000 batches; prompts' means with standard "
            "deviation 0, "
            "0.5 and 3 times that within prompts.",
            _shrinkage,
        ),
        PublishedClaim(
            "optimal-token-baseline",
            "The optimal token baseline",
            "“we derive the Optimal Token Baseline (OTB) from first principles, proving that gradient "
            "updates should "
            "be weighted inversely to their cumulative gradient norm” (abstract)",
            Source(
                "Li et al. (2026), The Optimal Token Baseline, arXiv:2602.07078",
                "The abstract was read. Not examined: the proxy by logits, and training.",
            ),
            _IDENTITIES,
            "Random enumerated models and rewards; expectations in the baseline are exact, where the paper "
            "estimates "
            "them from a group.",
            _token_baseline,
        ),
        PublishedClaim(
            "opd-sequence-credit-too-noisy",
            "Credit for the sequence is too noisy for distillation",
            "“token-level OPD is biased relative to sequence-level reverse-KL, but it has a much tighter "
            "worst-case "
            "variance bound; … stronger future-reward coupling producing higher gradient variance and less "
            "stable "
            "learning” (abstract)",
            Source(
                "Fu et al. (2026), Revisiting On-Policy Distillation: Empirical Failure Modes and Simple "
                "Fixes, "
                "arXiv:2603.25562",
                "The abstract was read.",
            ),
            "`python -m lit_klrb study --config configs/studies/distillation_tabular.yaml`",
            "Random enumerated models, 30 replicates, each arm at its own best rate chosen on 6 other runs.",
            _too_noisy,
        ),
        PublishedClaim(
            "ctpo-prefix-ratios",
            "CTPO: prefix ratios are unbiased and vary strictly less",
            "“this ratio provides an unbiased prefix correction for each token-level gradient term and has "
            "strictly "
            "lower variance than the full sequence ratio” (abstract)",
            Source(
                "Zhang et al. (2026), Rethinking Importance Sampling in LLM Policy Optimization: A "
                "Cumulative Token "
                "Perspective, arXiv:2605.07331",
                "The abstract was read.",
                "horizon-llm/CTPO (not read)",
            ),
            "`python -m lit_klrb study --config configs/studies/off_policy.yaml`",
            "The paper: rewards of sequences, with clipping. Ours: the gradient of the KL, without "
            "clipping, on random "
            "enumerated models after 1 to 8 inner steps.",
            _prefix_ratios,
        ),
    )
