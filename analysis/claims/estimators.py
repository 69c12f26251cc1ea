"""Claims about KL estimators in later papers."""

import numpy as np

from analysis.claims.claim import Number, PublishedClaim, Ruling, Source, Verdict
from analysis.claims.evidence import Evidence
from analysis.claims.measure import ROUNDING, mean_text
from analysis.results.enumerated import OffPolicyArtifact
from analysis.stats.text import number

_IDENTITIES = "`python -m lit_klrb study --config configs/studies/identities.yaml`"
_OFF_POLICY = "`python -m lit_klrb study --config configs/studies/off_policy.yaml`"
_WIDE = (
    "One position, 200 tokens, reference probabilities proportional to 1 / rank, at three distances; all "
    "tokens "
    "enumerated; relative to the sampled token's k1."
)
_COMEDY = (
    "Shah et al. (2025), A Comedy of Estimators: On KL Regularization in RL Training of LLMs, "
    "arXiv:2512.21852"
)


def _k1_in_reward(evidence: Evidence) -> Ruling:
    ends = {name: values[:, -1] for name, values in evidence.pitfalls.to_optimum.items()}
    theirs = ("MonteCarlo", "K1Loss", "K3Reward", "K3Loss")
    shown = (*theirs, "K2Loss", "RaoBlackwell", "MonteCarloRewardToGo")
    numbers = tuple(
        Number(f"KL to the optimum after descent, {name}", "–", mean_text(ends[name])) for name in shown
    )
    means = {name: float(np.mean(ends[name])) for name in shown}
    if min(theirs, key=means.__getitem__) != "MonteCarlo":
        return Ruling(
            Verdict.FAILS, "Another of the four configurations ends nearer to the optimum.", numbers
        )
    better = [name for name in shown if means[name] < means["MonteCarlo"]]
    if better:
        return Ruling(
            Verdict.ONLY_IF,
            f"compared with the other three of that paper: {' and '.join(better)} "
            f"end{'s' if len(better) == 1 else ''} nearer to the optimum.",
            numbers,
        )
    return Ruling(Verdict.HOLDS, "Among all that were compared.", numbers)


def _worst_bias(artifact: OffPolicyArtifact, correction: str) -> float:
    return max(
        float(by_correction[correction][term].bias.max())
        for by_correction in artifact.moments.values()
        for term in ("kl", "objective")
    )


def _open_problem(evidence: Evidence) -> Ruling:
    artifact = evidence.off_policy
    last = artifact.steps[-1]
    numbers = tuple(
        Number(
            f"bias of {name}, {correction}, after {last} inner steps",
            "–",
            mean_text(by_correction[correction]["kl"].bias[:, -1]),
        )
        for name, by_correction in artifact.moments.items()
        for correction in by_correction
    )
    if _worst_bias(artifact, "prefix") < ROUNDING:
        return Ruling(
            Verdict.FAILS,
            "It is no longer open: weights of the prefix, Π_{s<t} p(y_s) / p_old(y_s), with the exact KL "
            "of each "
            "token give the gradient of the sequence's KL without bias, off-policy too (`off_policy: "
            "prefix`).",
            numbers,
        )
    return Ruling(Verdict.HOLDS, "No correction examined is unbiased.", numbers)


def _k2_is_k1(evidence: Evidence) -> Ruling:
    found = evidence.identities["token_level"]
    numbers = (
        Number(
            "distance to the gradient of the KL, completions of one token", "0", mean_text(found["one_token"])
        ),
        Number("distance to the token-level part, sequences", "0", mean_text(found["to_token_level"])),
        Number("distance to the gradient of the KL, sequences", "0", mean_text(found["to_sequence"])),
    )
    one, token, sequence = (max(found[key]) for key in ("one_token", "to_token_level", "to_sequence"))
    if max(one, token) > ROUNDING:
        return Ruling(Verdict.FAILS, "They differ even with one token.", numbers)
    if sequence < ROUNDING:
        return Ruling(Verdict.HOLDS, "For sequences too.", numbers)
    return Ruling(
        Verdict.ONLY_IF,
        "a token is credited with its own log ratio alone. k1 in the reward of a sequence also has the "
        "effect of "
        "tokens on later KLs, which k2 as a loss omits.",
        numbers,
    )


def _deepseek(evidence: Evidence) -> Ruling:
    same = evidence.identities["names"]["ratio times k3 (unbiased KL)"]
    token = evidence.off_policy.moments["MonteCarlo"]["token"]["kl"].bias
    sequence = evidence.identities["token_level"]["to_sequence"]
    numbers = (
        Number(
            "largest difference to the gradient of k2 with the token's ratio, per sample", "–", number(same)
        ),
        Number("bias for the KL of the sequence, on-policy", "0", mean_text(sequence)),
        Number(
            f"bias of token ratios with the whole credit, after {evidence.off_policy.steps[-1]} inner steps",
            "0",
            mean_text(token[:, -1]),
        ),
    )
    if same > 1e-9:
        return Ruling(Verdict.FAILS, "It is not k2 with the token's ratio.", numbers)
    if max(sequence) < ROUNDING and token.max() < ROUNDING:
        return Ruling(Verdict.HOLDS, "For the KL of the sequence.", numbers)
    return Ruling(
        Verdict.ONLY_IF,
        "the KL is that of each token given its prefix, with the distribution of prefixes held fixed. It "
        "is, sample "
        "by sample, the gradient of k2 as a loss with the token's ratio.",
        numbers,
    )


def _rows(evidence: Evidence, name: str, key: str, head: str) -> dict[str, float]:
    """A number of a top-k estimate by KL of the case."""
    return {
        f"KL {number(case['kl'], 2)}": float(case["estimates"][name][head][key])
        for case in evidence.identities["topk"].values()
    }


def _topk_numbers(
    evidence: Evidence, name: str, keys: dict[str, str], heads: tuple[str, ...]
) -> list[Number]:
    published = {"gradient_bias": "0", "value_bias": "0", "variance": "below 1", "least_value": "–"}
    return [
        Number(
            f"{what}, k = {head}, at {', '.join(_rows(evidence, name, key, head))}",
            published[key],
            ", ".join(number(0.0 if abs(x) < 1e-9 else x) for x in _rows(evidence, name, key, head).values()),
        )
        for key, what in keys.items()
        for head in heads
    ]


_BIAS = {"gradient_bias": "bias of the gradient over its norm", "value_bias": "bias of the value, nats"}
_VARIANCE = {"variance": "variance of the gradient"}


def _ema(evidence: Evidence) -> Ruling:
    heads = ("1", "8", "32", "128")
    numbers = (
        *_topk_numbers(evidence, "detached tail", _BIAS, heads),
        *_topk_numbers(evidence, "exact head, sampled tail", _BIAS | _VARIANCE, ("32",)),
    )
    worst = {
        key: max(abs(x) for head in heads for x in _rows(evidence, "detached tail", key, head).values())
        for key in _BIAS
    }
    if worst["gradient_bias"] < ROUNDING and worst["value_bias"] < ROUNDING:
        return Ruling(Verdict.HOLDS, "Value and gradient, at every k.", numbers)
    if worst["value_bias"] < ROUNDING:
        return Ruling(
            Verdict.FAILS,
            "The value is unbiased. The gradient of the released code is not: the head Σ_H p log(p/q) is "
            "differentiated whole, whose gradient has that of the head's mass in it, and the detached tail "
            "has "
            "nothing to cancel it. Σ_H (p log(p/q) − p + q) as the head does (`RaoBlackwellTopK`).",
            numbers,
        )
    return Ruling(Verdict.FAILS, "Value and gradient are biased.", numbers)


def _mopd(evidence: Evidence) -> Ruling:
    heads = ("8", "32", "128")
    numbers = (
        *_topk_numbers(evidence, "head only", _BIAS, heads),
        *_topk_numbers(evidence, "truncated", _BIAS, ("32",)),
    )
    values = [x for head in heads for x in _rows(evidence, "head only", "value_bias", head).values()]
    own, truncated = (
        _rows(evidence, name, "gradient_bias", "32").values() for name in ("head only", "truncated")
    )
    if max(values) > 1e-9 or not all(a < b for a, b in zip(own, truncated, strict=True)):
        return Ruling(Verdict.FAILS, "It is no lower bound, or no better than plain truncation.", numbers)
    if min(values) > -1e-9:
        return Ruling(Verdict.HOLDS, "Without any bias.", numbers)
    return Ruling(
        Verdict.ONLY_IF,
        "a lower bound is what is wanted: it is never negative and far less biased than plain truncation, "
        "but not "
        "unbiased. A sampled tail, ratio × k3 outside the head, removes the rest (`RaoBlackwellTopK`).",
        numbers,
    )


def _vopd(evidence: Evidence) -> Ruling:
    heads = ("8", "32", "200")
    numbers = tuple(_topk_numbers(evidence, "baseline", _BIAS | _VARIANCE, heads))
    bias = max(x for head in heads for x in _rows(evidence, "baseline", "gradient_bias", head).values())
    whole = list(_rows(evidence, "baseline", "variance", "200").values())
    if bias > ROUNDING:
        return Ruling(Verdict.FAILS, "The gradient is biased.", numbers)
    if max(whole) < 1:
        least = 1 - min(whole)
        return Ruling(
            Verdict.HOLDS,
            f"But by little: the baseline removes at most {least:.0%} of the variance here, where the "
            "exact sum over "
            "the vocabulary, for which it needs the same numbers, removes all.",
            numbers,
        )
    return Ruling(Verdict.ONLY_IF, "the student is far from the teacher.", numbers)


def later_estimators() -> tuple[PublishedClaim, ...]:
    """The claims, oldest first."""
    enumerated = "Random enumerated models; theirs are language models of billions of parameters."
    return (
        PublishedClaim(
            "k2-loss-is-k1-reward",
            "k2 as a loss is k1 in the reward",
            "“under on-policy conditions, the ‘k2 as loss’ formulation is, in fact, gradient-equivalent to "
            "‘k1 in "
            "reward’” (abstract)",
            Source(
                "Liu, Liu, Chen, Liu (2025), Rethinking KL Regularization in RLHF, arXiv:2510.01555",
                "The abstract was read.",
            ),
            _IDENTITIES,
            enumerated,
            _k2_is_k1,
        ),
        PublishedClaim(
            "deepseek-unbiased-kl",
            "DeepSeek-V3.2's unbiased KL",
            "Equation 7: π/π_old (π_ref/π − log(π_ref/π) − 1): “the gradient of the KL estimator becomes "
            "unbiased”.",
            Source(
                "DeepSeek-AI (2025), technical report of DeepSeek-V3.2 (section 3.1)",
                "The report was not read; equation and quotation are from huggingface/trl issue 4637.",
            ),
            f"{_IDENTITIES}; {_OFF_POLICY}",
            enumerated,
            _deepseek,
        ),
        PublishedClaim(
            "k1-in-reward-best",
            "k1 in the reward is best",
            "“using estimator configurations resulting in unbiased gradients leads to better performance” "
            "(abstract); "
            "of four configurations, k1 in the reward.",
            Source(_COMEDY, "The abstract and a summary were read (emergentmind.com)."),
            "`python -m lit_klrb study --config configs/studies/pitfalls.yaml`",
            "The paper: language models of 4 to 8 billion parameters on mathematics. Ours: descent on "
            "E[reward] − "
            "β KL of random enumerated models, one rate.",
            _k1_in_reward,
        ),
        PublishedClaim(
            "off-policy-open-problem",
            "The unbiased off-policy gradient is an open problem",
            "“We leave the implementation and analysis of an unbiased sequence level reverse KL gradient "
            "estimate in "
            "off-policy settings for future work.”",
            Source(_COMEDY, "The passage was read as quoted by emergentmind.com/open-problems."),
            _OFF_POLICY,
            "Random enumerated models; inner steps along the exact gradient.",
            _open_problem,
        ),
        PublishedClaim(
            "ema-pg-unbiased-topk",
            "EMA-PG's top-k KL is unbiased at any k",
            "“our Top-k KL estimator yields both unbiased KL values and unbiased gradients at any k” "
            "(abstract and "
            "README)",
            Source(
                "Zhang, Ba (2026), EMA Policy Gradient, arXiv:2602.04417",
                "The abstract, the README and compute_memory_efficient_kl were read.",
                "LunjunZhang/ema-pg at f9b977632ad9, search/verl/trainer/ppo/core_algos.py, line 460",
            ),
            _IDENTITIES,
            _WIDE,
            _ema,
        ),
        PublishedClaim(
            "mopd-head",
            "MOPD's head",
            "The KL is approximated by Σ_H (p log(p/q) − p + q) over the k most likely tokens.",
            Source(
                "Ma et al. (2026), MOPD: Multi-Teacher On-Policy Distillation, arXiv:2606.30406",
                "Only the abstract could be read, which does not have the formula; it is quoted second-hand.",
            ),
            _IDENTITIES,
            _WIDE,
            _mopd,
        ),
        PublishedClaim(
            "vopd-variance",
            "vOPD's baseline reduces variance without bias",
            "“subtracting the value function as a detached baseline to keep the gradient unbiased while "
            "reducing "
            "variance” (abstract)",
            Source(
                "Oh, Song, Choi, Choi, Jo (2026), KL for a KL: On-Policy Distillation with Control Variate "
                "Baseline, "
                "arXiv:2605.07865",
                "The abstract was read.",
            ),
            _IDENTITIES,
            _WIDE,
            _vopd,
        ),
    )
