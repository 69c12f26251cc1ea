"""Claims of Amini, Vieira and Cotterell (2025)."""

import numpy as np

from analysis.claims.claim import Number, PublishedClaim, Ruling, Source, Verdict
from analysis.claims.evidence import Evidence
from analysis.claims.measure import above, below, log_ratio, ratio_text, reviewed, spreads
from analysis.report.audit_share import points_needed, sign_p
from analysis.stats.text import number

_PAPER = (
    "Amini, Vieira, Cotterell (2025), Better Estimation of the KL Divergence Between Language Models, "
    "arXiv:2504.10637"
)
_CODE = "rycolab/kl-rb at 89cd8e065660"
_SECOND_HAND = (
    "The abstract, the introduction and the released code were read. The page with this number could not "
    "be read: "
    "it is quoted second-hand."
)
_TABLE = Source(_PAPER, _SECOND_HAND, _CODE)
_REVIEWS = "the four-layer GPT-2 of docs/results/imdb_small, trained from scratch on IMDB reviews"


def _against_k1(evidence: Evidence, name: str, published: str) -> tuple[Number, ...]:
    """Standard deviations at M = 1, relative to Monte Carlo."""
    rows = [
        Number(f"variance relative to Monte Carlo, {label}", published, ratio_text(found[name].log_ratio))
        for label, found in spreads(evidence).items()
    ]
    for when, own in zip(("start", "end"), reviewed(evidence, name), strict=True):
        rows.append(
            Number(
                f"variance relative to Monte Carlo, reviews, {when} of training",
                published,
                number(float(np.exp(own["log_variance_ratio"]))),
            )
        )
    return tuple(rows)


def _reviewed_ratios(evidence: Evidence, name: str) -> list[float]:
    return [one["log_variance_ratio"] for one in reviewed(evidence, name)]


def _less_variance(evidence: Evidence) -> Ruling:
    numbers = _against_k1(evidence, "rb", "0.47 (SD .11 against .16)")
    enumerated = [found["rb"].log_ratio for found in spreads(evidence).values()]
    real = _reviewed_ratios(evidence, "rb")
    if all(below(one) for one in enumerated) and max(real) < 0:
        return Ruling(Verdict.HOLDS, "It has less variance in every case examined.", numbers)
    if any(above(one) for one in enumerated) and min(real) > 0:
        return Ruling(Verdict.FAILS, "It has more variance in the cases examined.", numbers)
    return Ruling(Verdict.ONLY_IF, "the case is one of those below with a ratio under 1.", numbers)


def _exploding_control_variate(evidence: Evidence) -> Ruling:
    found = spreads(evidence)
    mass = [
        Number(f"mass of the reference covered, {one.label}", "–", number(float(one.reference_mass.mean())))
        for one in evidence.estimation.snapshots
        if one.reference_mass is not None
    ]
    numbers = (*_against_k1(evidence, "cv", "252 (SD 2.54 against .16)"), *mass)
    ratios = [one["cv"].log_ratio.value for one in found.values()] + _reviewed_ratios(evidence, "cv")
    if min(ratios) > 0:
        return Ruling(Verdict.HOLDS, "Its variance is larger in every case examined.", numbers)
    if max(ratios) < 0:
        return Ruling(Verdict.FAILS, "Its variance is smaller in every case examined.", numbers)
    return Ruling(
        Verdict.ONLY_IF,
        "the policy is far from the reference: near it, this control variate has less variance than Monte "
        "Carlo. Far away its mean is too low where the completions miss mass of the reference.",
        numbers,
    )


def _fitted_control_variate(evidence: Evidence) -> Ruling:
    numbers = _against_k1(evidence, "cv_fitted", "1 (same SD)")
    ratios = [one["cv_fitted"].log_ratio.value for one in spreads(evidence).values()]
    ratios += _reviewed_ratios(evidence, "cv_fitted")
    if all(abs(ratio) < np.log(1.2) for ratio in ratios):
        return Ruling(Verdict.HOLDS, "Its variance is within 20 % of Monte Carlo's everywhere.", numbers)
    if min(ratios) < -np.log(1.2) and max(ratios) < np.log(1.2):
        return Ruling(
            Verdict.ONLY_IF, "the policy is far from the reference: near it, a fitted α does better.", numbers
        )
    return Ruling(
        Verdict.ONLY_IF,
        "α can be fitted: near the reference it does better than Monte Carlo, and far from it, where few "
        "completions dominate the fit, worse.",
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
        return Ruling(Verdict.HOLDS, "No model was found where it does not.", tuple(numbers))
    return Ruling(
        Verdict.FAILS,
        "It holds for each token given its prefix. For the sum over a sequence there is a counterexample: a "
        "large first log ratio can cancel later ones, and exact KLs do not cancel.",
        tuple(numbers),
    )


def _count(found: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> str:
    return f"{int(found.sum())} of {len(found)}"


def _gradient_noise(evidence: Evidence) -> Ruling:
    identities = evidence.identities
    kl = {
        case: log_ratio(found["RaoBlackwell"], found["MonteCarlo"])
        for case, found in identities["gradients"].items()
    }
    path = identities["path"]
    whole = {
        place: log_ratio(rb, mc)
        for place, rb, mc in zip(path["places"], path["RaoBlackwell"], path["MonteCarlo"], strict=True)
    }
    reviews = [
        one
        for one in evidence.reviews["sections"]["gradient_noise"]["findings"]
        if one["estimator"] == "RaoBlackwell"
    ]
    published = "0.76 (45.44 / 59.90)"
    numbers = [
        Number(f"variance ratio, KL alone, enumerated, {case}", published, ratio_text(one))
        for case, one in kl.items()
    ]
    numbers += [
        Number(
            f"variance ratio, whole objective, {place:.0%} of the way to the optimum", "–", ratio_text(one)
        )
        for place, one in whole.items()
    ]
    for one in reviews:
        low, high = (number(float(np.exp(end))) for end in one["interval"])
        text = f"{number(float(np.exp(one['log_ratio'])))} ({low} to {high})"
        numbers.append(Number(f"variance ratio, {one['term']}, reviews, step {one['step']}", published, text))
    if not all(below(one) for one in kl.values()):
        return Ruling(Verdict.FAILS, "Not even the KL's gradient alone is less noisy.", tuple(numbers))
    if all(below(one) for one in whole.values()):
        return Ruling(Verdict.HOLDS, "For the KL alone and for the whole objective.", tuple(numbers))
    return Ruling(
        Verdict.ONLY_IF,
        "the gradient is that of the KL alone, or of the whole objective far from its optimum: near the "
        "optimum Monte Carlo's noise of the KL cancels that of the reward.",
        tuple(numbers),
    )


def _frontier_ruling(evidence: Evidence, wins: tuple[tuple[int, int], ...], published: str) -> Ruling:
    verdicts = evidence.reviews["sections"]["verdict"]["verdicts"]["RaoBlackwell"]
    own = next(one for one in verdicts if one["claim"] == "frontier_share")
    objective = next(one for one in verdicts if one["claim"] == "objective")
    low, high = (number(end) for end in own["interval"])
    numbers = [
        Number("share of the frontier, reviews (95% interval)", published, f"{low} to {high}"),
        Number("p of the exact swap test of that share", "none", number(own["p"], 2)),
        Number(
            "reward − β KL minus Monte Carlo's, reviews",
            "–",
            f"{number(objective['estimate'])} ({number(objective['interval'][0])} to "
            f"{number(objective['interval'][1])}): {objective['outcome']}",
        ),
    ]
    for k, n in wins:
        numbers.append(Number(f"p if the share is {k} of {n} points", "none", number(sign_p(k, n), 2)))
    needed = points_needed(wins[0][0] / wins[0][1])
    numbers.append(Number("points needed for such a share (power 80 %)", "–", str(needed)))
    return Ruling(
        Verdict.NOT_TESTABLE,
        "The number of points behind the share is not published, and it decides: the same share is within "
        "chance or far outside it. The share also rewards variance, and drifts with the number of seeds.",
        tuple(numbers),
    )


def _frontier_78(evidence: Evidence) -> Ruling:
    return _frontier_ruling(evidence, ((7, 9), (14, 18), (28, 36)), "78 %")


def _frontier_95(evidence: Evidence) -> Ruling:
    return _frontier_ruling(evidence, ((19, 20), (38, 40)), "95 %")


def _table_differences() -> str:
    return (
        "The paper: GPT-2 fine-tuned on IMDB by DPO, 512 prompts. Ours: random enumerated models, where the "
        f"exact KL is known, and {_REVIEWS}, at the start and the end of RLOO."
    )


def first_source() -> tuple[PublishedClaim, ...]:
    """The claims, in the order of the paper."""
    study = "`python -m lit_klrb study --config configs/studies/estimation.yaml`"
    ran = f"{study}; the report of docs/results/imdb_small."
    identities = "`python -m lit_klrb study --config configs/studies/identities.yaml`"
    sweep = "The report of docs/results/imdb_small; `python -m analysis audit --share 7/9`."
    training = (
        f"Ours: {_REVIEWS}; 6 replicates at 3 betas, all scored by the same evaluator, plan locked before."
    )
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
            "equal to "
            "that of the standard Monte Carlo estimator” (abstract)",
            Source(_PAPER, "The abstract was read.", _CODE),
            identities,
            "Random models with three tokens and at most three positions, near the reference (distance .3) "
            "and far; "
            "single completions for values, two with leave-one-out for gradients; all completions "
            "enumerated.",
            _provably,
        ),
        PublishedClaim(
            "rb-gradient-noise",
            "The gradient's noise: 59.90 against 45.44",
            "The variance of the gradient is 59.90 with MC and 45.44 with RB.",
            _TABLE,
            f"{identities}; the report of docs/results/imdb_small.",
            "What the published numbers are the variance of is not known to us. Ours: trace of the "
            "covariance, of "
            f"the KL alone and of the whole objective, on random enumerated models and {_REVIEWS}.",
            _gradient_noise,
        ),
        PublishedClaim(
            "frontier-78",
            "78 % of the Pareto frontier",
            "Models trained with RB are on the frontier of reward and KL 78 % of the time.",
            Source(
                _PAPER,
                "The abstract and a summary of the paper were read (“models appearing on the Pareto "
                "frontier 78% of "
                "the time”, papernotes.org).",
                _CODE,
            ),
            sweep,
            f"The paper: GPT-2, 36 runs. {training}",
            _frontier_78,
        ),
        PublishedClaim(
            "frontier-95",
            "95 % of the frontier below a KL of 5",
            "Below a KL of 5 nats, 95 % of the frontier are models trained with RB.",
            _TABLE,
            sweep,
            f"The paper: GPT-2, 36 runs. {training}",
            _frontier_95,
        ),
    )
