"""Claims of Amini, Vieira and Cotterell (2025)."""

import numpy as np

from analysis.stats.intervals import Estimate
from analysis.stats.kl_values import EstimatorSpread
from analysis.stats.text import number
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import STUDIES, Evidence
from replication.claims.measure import above, below, count_text, log_ratio, ratio_text, spreads, trained_cases

_PAPER = (
    "Amini, Vieira, Cotterell (2025), Better Estimation of the KL Divergence Between Language Models, "
    "arXiv:2504.10637"
)
_CODE = "rycolab/kl-rb at 89cd8e065660"
_TABLE = Citation(
    _PAPER,
    "The abstract, the introduction and the released code were read; these numbers only in a summary of the "
    "paper (papernotes.org).",
    _CODE,
)
_REVIEWS = "the four-layer GPT-2 of replication/results/imdb_estimation, trained from scratch on IMDB reviews"


# Table 1: mean, and standard deviation with M = 1, 5 and 10 completions.
_PUBLISHED = {
    "k1": "6.76 ± 0.16 / 0.07 / 0.05",
    "rb": "6.76 ± 0.11 / 0.05 / 0.03",
    "cv": "6.28 ± 2.54 / 1.13 / 0.79",
    "cv_fitted": "6.76 ± 0.16 / 0.07 / 0.05",
    "ht": "–",
}
_NAMES = {"k1": "MC", "rb": "RB", "cv": "CV, α = 1", "cv_fitted": "CV, α*", "ht": "HT"}


def _against_k1(evidence: Evidence, name: str, published: str) -> tuple[Number, ...]:
    """Variance relative to Monte Carlo, and the estimator's and Monte Carlo's rows of table 1."""
    cases = spreads(evidence)
    ratios = [
        Number(f"variance relative to Monte Carlo, {case}", published, ratio_text(found[name].log_ratio))
        for case, found in cases.items()
    ]
    rows = [
        _row(one, case, cases[case][one], study.prompts)
        for one in ("k1", name)
        for case, (_, study) in trained_cases(evidence).items()
    ]
    return (*ratios, *rows)


def _row(name: str, case: str, found: EstimatorSpread, prompts: int) -> Number:
    """A row of table 1: the mean and its deviations, which are those of a mean over all prompts."""
    sizes = " / ".join(map(str, found.deviations))
    deviations = " / ".join(number(single / prompts**0.5, 2) for single in found.deviations.values())
    return Number(
        f"{_NAMES[name]}: mean ± SD with {sizes} completions of each of {prompts} prompts, {case}",
        _PUBLISHED[name],
        f"{number(found.mean.value)} ± {deviations}",
    )


def _log_ratios(evidence: Evidence, name: str) -> list[Estimate]:
    return [found[name].log_ratio for found in spreads(evidence).values()]


def _less_variance(evidence: Evidence) -> Ruling:
    numbers = _against_k1(evidence, "rb", "0.47 (SD .11 against .16)")
    ratios = _log_ratios(evidence, "rb")
    if all(map(below, ratios)):
        return Ruling(Status.HOLDS, "It has less variance in every case examined.", numbers)
    if all(map(above, ratios)):
        return Ruling(Status.FAILS, "It has more variance in every case examined.", numbers)
    return Ruling(Status.ONLY_IF, "the case is one of those below with an interval under 1.", numbers)


def _exploding_control_variate(evidence: Evidence) -> Ruling:
    mass = [
        Number(f"mass of the reference covered, {one.label}", "–", number(float(one.reference_mass.mean())))
        for one in evidence.estimation.snapshots
        if one.reference_mass is not None
    ]
    prompts = [
        Number(
            f"prompts at which its sample variance is larger, {case}",
            "a majority",
            _count(one.values["cv"].var(1, ddof=1) > one.values["k1"].var(1, ddof=1)),
        )
        for case, (one, _) in trained_cases(evidence).items()
    ]
    numbers = (*_against_k1(evidence, "cv", "252 (SD 2.54 against .16)"), *prompts, *mass)
    ratios = _log_ratios(evidence, "cv")
    if all(map(above, ratios)):
        return Ruling(Status.HOLDS, "Its variance is larger in every case examined.", numbers)
    if not any(map(above, ratios)):
        return Ruling(Status.FAILS, "Its variance is significantly larger in no case examined.", numbers)
    cases = {case: float(found["k1"].mean.value) for case, found in spreads(evidence).items()}
    larger = [case for case, ratio in zip(cases, ratios, strict=True) if above(ratio)]
    farthest = max(cases, key=cases.__getitem__)
    counts = (
        f"n {len(larger)} of {len(ratios)} cases ({'; '.join(larger)}) its variance is significantly larger, "
        f"in {sum(map(below, ratios))} smaller. At the farthest policy, {number(cases[farthest])} nats, it "
        f"is {ratio_text(ratios[list(cases).index(farthest)])} times Monte Carlo's. Single completions "
        "dominate these variances."
    )
    if farthest in larger:
        return Ruling(Status.ONLY_IF, f"the policy is far from the reference: i{counts}", numbers)
    return Ruling(Status.INCONCLUSIVE, f"I{counts}", numbers)


def _fitted_control_variate(evidence: Evidence) -> Ruling:
    numbers = _against_k1(evidence, "cv_fitted", "1 (same SD)")
    ratios = _log_ratios(evidence, "cv_fitted")
    margin = float(np.log(1.2))
    if all(above(one, -margin) and below(one, margin) for one in ratios):
        return Ruling(Status.HOLDS, "Its variance is within 20 % of Monte Carlo's everywhere.", numbers)
    smaller, larger = (sum(map(side, ratios)) for side in (below, above))
    return Ruling(
        Status.ONLY_IF,
        f"the case is neither near the reference, where a fitted α does better (significantly in {smaller} "
        f"of {len(ratios)} cases), nor so far that few completions dominate the fit (worse in {larger}).",
        numbers,
    )


def _horvitz_thompson(evidence: Evidence) -> Ruling:
    numbers = _against_k1(evidence, "ht", "not below 1")
    ratios = _log_ratios(evidence, "ht")
    smaller = sum(map(below, ratios))
    if not smaller:
        return Ruling(Status.HOLDS, "Its variance is significantly smaller in no case examined.", numbers)
    if smaller == len(ratios):
        return Ruling(Status.FAILS, "Its variance is significantly smaller in every case examined.", numbers)
    return Ruling(
        Status.ONLY_IF,
        f"completions rarely repeat: the interval is below 1 in {smaller} of {len(ratios)} cases.",
        numbers,
    )


def _provably(evidence: Evidence) -> Ruling:
    values, gradients = evidence.identities["values"], evidence.identities["gradients"]
    counter = evidence.identities["counterexample"]
    numbers = [
        Number(
            "counterexample of two tokens, variance of the value: Monte Carlo", "–", number(counter["k1"])
        ),
        Number("the same: Rao-Blackwell", "at most that", number(counter["rb"])),
    ]
    for case in values:
        worse = np.array(values[case]["rb"]) > np.array(values[case]["k1"])
        numbers.append(
            Number(f"random models with a larger variance of the value, {case}", "0", _count(worse))
        )
        noisier = np.array(gradients[case]["RaoBlackwell"]) > np.array(gradients[case]["MonteCarlo"])
        numbers.append(Number(f"random models with a noisier gradient, {case}", "0", _count(noisier)))
    if counter["rb"] <= counter["k1"] + 1e-12:
        return Ruling(Status.HOLDS, "No model was found where it does not.", tuple(numbers))
    return Ruling(
        Status.FAILS,
        "It holds for each token given its prefix. For the sum over a sequence there is a counterexample: a "
        "large first log ratio can cancel later ones, and exact KLs do not cancel.",
        tuple(numbers),
    )


def _overhead(evidence: Evidence) -> Ruling:
    ratios = {}
    for one in evidence.sweeps.values():
        arms = [one.arm(name) for name in ("RaoBlackwell", "MonteCarlo")]
        rb, mc = (one.seconds(arm) if arm is not None else {} for arm in arms)
        both = sorted(rb.keys() & mc.keys())
        if len(both) > 1:
            what = f"wall time of a run with {arms[0]} over {arms[1]}, {len(both)} pairs: {one.title}"
            ratios[what] = log_ratio([rb[place] for place in both], [mc[place] for place in both])
    margin = float(np.log(1.05))
    numbers = tuple(Number(what, "1", ratio_text(one)) for what, one in ratios.items())
    if any(map(above, ratios.values())):
        return Ruling(Status.FAILS, "A run takes significantly longer.", numbers)
    if ratios and all(above(one, -margin) and below(one, margin) for one in ratios.values()):
        return Ruling(Status.HOLDS, "Every interval is within 5 % of 1.", numbers)
    return Ruling(
        Status.INCONCLUSIVE,
        "No run takes significantly longer, but these times, on machines with other work, cannot exclude 5 % "
        "more. replication/evidence/benchmarks.md has ratios of variants that alternate in one process.",
        numbers,
    )


def _count(found: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> str:
    return count_text(int(found.sum()), len(found))


def _table_differences() -> str:
    return (
        "The paper: GPT-2 fine-tuned on IMDB by DPO, 512 prompts. Ours are toys: random enumerated models, "
        f"whose exact KL is known, and {_REVIEWS}, after DPO and after 50 and 100 steps of RLOO. SmolLM2, "
        "of the size of the paper's model, is after at most 12 steps of RLOO, much nearer to its reference, "
        "and after DPO and 8 steps of RLOO from there, at 0.7 to 8.1 nats and at most 16 tokens. "
        "The published standard deviations seem to be of a mean over all prompts; so are ours of trained "
        "policies."
    )


def first_source() -> tuple[PublishedClaim, ...]:
    """The claims, in the order of the paper."""
    study = "`python -m replication study --config replication/configs/studies/{}.yaml`"
    smollm2 = "; ".join(f"`{STUDIES[name].made_by}`" for name in ("smollm2", "smollm2_far", "smollm2_end"))
    ran = f"{study.format('estimation')}; {study.format('imdb_estimation')}; {smollm2}."
    identities = study.format("identities")
    return (
        PublishedClaim(
            "rb-value-variance",
            "Rao-Blackwell estimates of the KL vary less",
            "Table 1: MC 6.76 ± 0.16 / 0.07 / 0.05, RB 6.76 ± 0.11 / 0.05 / 0.03 at M = 1 / 5 / 10.",
            _TABLE,
            ran,
            _table_differences(),
            _less_variance,
        ),
        PublishedClaim(
            "cv-alpha-1",
            "The control variate with α = 1 explodes",
            "Table 1: CV α = 1 6.28 ± 2.54 / 1.13 / 0.79, where MC has 6.76 ± 0.16 / 0.07 / 0.05.",
            _TABLE,
            ran,
            _table_differences(),
            _exploding_control_variate,
        ),
        PublishedClaim(
            "cv-fitted",
            "A fitted α gives what Monte Carlo gives",
            "Table 1: CV α* as MC.",
            _TABLE,
            ran,
            _table_differences(),
            _fitted_control_variate,
        ),
        PublishedClaim(
            "provably-no-more-variance",
            "Provably no more variance",
            "“a Rao–Blackwellized estimator that is also unbiased and provably has variance less than or "
            "equal to that of the standard Monte Carlo estimator” (abstract)",
            Citation(_PAPER, "The abstract was read.", _CODE),
            identities,
            "Random models with three tokens and at most three positions, near the reference (distance .3) "
            "and far; single completions for values, two with leave-one-out for gradients; all completions "
            "enumerated.",
            _provably,
        ),
        PublishedClaim(
            "ht-no-improvement",
            "Horvitz-Thompson does not reduce the variance",
            "Horvitz-Thompson is unbiased too, but does not improve the variance over Monte Carlo.",
            _TABLE,
            ran,
            _table_differences(),
            _horvitz_thompson,
        ),
        PublishedClaim(
            "zero-overhead",
            "Zero additional computational overhead",
            "“incurs zero additional computational overhead” (a summary of the paper)",
            Citation(_PAPER, "Read only in the summary at papernotes.org.", _CODE),
            "The sweeps of replication/results that have both estimators and the times of their runs "
            "(`seconds.json`).",
            "The paper compares no times that were read. Ours: whole runs of small GPT-2s, sampling and "
            "evaluation included, with the tiled loss of this package.",
            _overhead,
        ),
    )
