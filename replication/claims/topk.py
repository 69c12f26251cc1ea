"""Claims about the KL over a part of the vocabulary, in later papers."""

from analysis.stats.text import number
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import Evidence
from replication.claims.measure import ROUNDING, difference_text
from replication.claims.trained import compared, designs_of, kl_finding

_IDENTITIES = "`python -m replication study --config replication/configs/studies/identities.yaml`"
_WIDE = (
    "One position, 200 tokens, reference probabilities proportional to 1 / rank, at three distances; all "
    "tokens enumerated; relative to the sampled token's k1."
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
            f"{name}: {what}, k = {head}, at {', '.join(_rows(evidence, name, key, head))}",
            published[key],
            ", ".join(number(0.0 if abs(x) < 1e-9 else x) for x in _rows(evidence, name, key, head).values()),
        )
        for key, what in keys.items()
        for head in heads
    ]


def _trained(evidence: Evidence, arms: tuple[str, ...], control: str) -> list[Number]:
    """The KL to the teacher that students end at, over that of another arm."""
    pairs = [(arm, control) for arm in arms]
    designs = [design for _, one in evidence.students for design in designs_of(one, *pairs)]
    return [
        Number(f"training: KL of {arm} over that of {control}, {one.title}", "–", difference_text(found))
        for (one, arm, _), found in zip(designs, compared(designs, kl_finding), strict=True)
    ]


_BIAS = {"gradient_bias": "bias of the gradient over its norm", "value_bias": "bias of the value, nats"}
_VARIANCE = {"variance": "variance of the gradient"}


def _ema(evidence: Evidence) -> Ruling:
    heads = ("1", "8", "32", "128")
    numbers = (
        *_topk_numbers(evidence, "detached tail", _BIAS, heads),
        *_topk_numbers(evidence, "exact head, sampled tail", _BIAS | _VARIANCE, ("32",)),
        *_trained(evidence, ("future-top-1%", "future-top-10%"), "future-exact"),
    )
    worst = {
        key: max(abs(x) for head in heads for x in _rows(evidence, "detached tail", key, head).values())
        for key in _BIAS
    }
    if worst["gradient_bias"] < ROUNDING and worst["value_bias"] < ROUNDING:
        return Ruling(Status.HOLDS, "Value and gradient, at every k.", numbers)
    if worst["value_bias"] < ROUNDING:
        return Ruling(
            Status.FAILS,
            "The value is unbiased. The gradient of the released code is not: the head Σ_H p log(p/q) is "
            "differentiated whole, whose gradient has that of the head's mass in it, and the detached tail "
            "has nothing to cancel it. With Σ_H (p log(p/q) − p + q) as the head it is (`RaoBlackwellTopK`).",
            numbers,
        )
    return Ruling(Status.FAILS, "Value and gradient are biased.", numbers)


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
        return Ruling(Status.FAILS, "It is no lower bound, or no better than plain truncation.", numbers)
    if min(values) > -1e-9:
        return Ruling(Status.HOLDS, "Without any bias.", numbers)
    return Ruling(
        Status.ONLY_IF,
        "a lower bound is what is wanted: it is never negative, and its gradient is less biased than that "
        "of plain truncation (its value here is not), but not unbiased. A sampled tail, ratio × k3 outside "
        "the head, removes the rest (`RaoBlackwellTopK`).",
        numbers,
    )


def _vopd(evidence: Evidence) -> Ruling:
    heads = ("8", "32", "200")
    numbers = (
        *_topk_numbers(evidence, "baseline", _BIAS | _VARIANCE, heads),
        *_trained(evidence, ("own-vopd", "own-exact"), "own-sampled"),
    )
    bias = max(x for head in heads for x in _rows(evidence, "baseline", "gradient_bias", head).values())
    whole = list(_rows(evidence, "baseline", "variance", "200").values())
    if bias > ROUNDING:
        return Ruling(Status.FAILS, "The gradient is biased.", numbers)
    if max(whole) < 1:
        some = max(x for head in heads for x in _rows(evidence, "baseline", "variance", head).values())
        return Ruling(
            Status.HOLDS,
            f"But by little: the baseline removes at most {1 - min(whole):.0%} of the variance here, where "
            "the exact sum over the vocabulary, for which it needs the same numbers, removes all. With the "
            f"k most likely tokens in place of the vocabulary the variance is up to {number(some)} times "
            "that without a baseline.",
            numbers,
        )
    return Ruling(Status.ONLY_IF, "the student is far from the teacher.", numbers)


def topk_claims() -> tuple[PublishedClaim, ...]:
    """The claims, oldest first."""
    return (
        PublishedClaim(
            "ema-pg-unbiased-topk",
            "EMA-PG's top-k KL is unbiased at any k",
            "“our Top-k KL estimator yields both unbiased KL values and unbiased gradients at any k” "
            "(abstract and README)",
            Citation(
                "Zhang, Ba (2026), EMA Policy Gradient, arXiv:2602.04417",
                "The abstract, the README and compute_memory_efficient_kl were read.",
                "LunjunZhang/ema-pg at f9b977632ad9, search/verl/trainer/ppo/core_algos.py, line 460",
            ),
            _IDENTITIES,
            f"{_WIDE} In training: `RaoBlackwellTopK` on toys, small GPT-2s on the embedded world and on "
            "reviews, each arm at the best rate tried for it; EMA-PG's own estimator was not trained with.",
            _ema,
        ),
        PublishedClaim(
            "mopd-head",
            "MOPD's head",
            "Equation 5: per position, Σ_H (p log(p/q) − p + q) over the 64 tokens that the teacher gives "
            "most.",
            Citation(
                "Ma et al. (2026), MOPD: Multi-Teacher On-Policy Distillation, arXiv:2606.30406",
                "Only the abstract could be read; the equation is quoted second-hand, from implementations "
                "of it.",
            ),
            _IDENTITIES,
            _WIDE,
            _mopd,
        ),
        PublishedClaim(
            "vopd-variance",
            "vOPD's baseline reduces variance without bias",
            "“subtracting the value function as a detached baseline to keep the gradient unbiased while "
            "reducing variance” (abstract)",
            Citation(
                "Oh, Song, Choi, Choi, Jo (2026), KL for a KL: On-Policy Distillation with Control Variate "
                "Baseline, arXiv:2605.07865",
                "The abstract was read.",
            ),
            _IDENTITIES,
            f"{_WIDE} Of a sequence's KL, its expectation is the token-level part. In training: toys, a "
            "GPT-2 of one or two layers, each arm at the best rate tried for it.",
            _vopd,
        ),
    )
