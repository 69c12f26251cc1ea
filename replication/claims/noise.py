"""The claim of Amini, Vieira and Cotterell (2025) about the noise of the gradient."""

from collections.abc import Iterator

from analysis.results.artifacts import GradientStudy
from analysis.stats.gradient_noise import NoiseSnapshot, compare_gradient_variance
from analysis.stats.intervals import Estimate
from analysis.stats.text import number
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import Evidence
from replication.claims.measure import below, log_ratio, ratio_ends, ratio_text, run_of
from replication.claims.trained import Trained

_PUBLISHED = "0.76 (45.44 / 59.90)"
_NORMS = {"MonteCarlo": "59.90", "RaoBlackwell": "45.44"}
# Whose gradient.
_TERMS = {"KL": "KL alone", "total": "whole objective"}
_RELEASED = ["ReleasedRaoBlackwell", "ReleasedMonteCarlo"]


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
    numbers = [
        Number(f"KL alone, enumerated, {case}", _PUBLISHED, ratio_text(one)) for case, one in kl.items()
    ]
    numbers += [
        Number(f"whole objective, enumerated, {place:.0%} of the way to the optimum", "–", ratio_text(one))
        for place, one in whole.items()
    ]
    numbers += [row for one in evidence.policies for row in _rows(one)]
    numbers += _reviews(evidence.reviews_noise)
    numbers += _norms(evidence.reviews_noise)
    alone, wholes = (_ends(evidence, term) for term in _TERMS)
    if not all(map(below, kl.values())) or not all(high < 0 for _, high in alone):
        return Ruling(Status.FAILS, "Not even the KL's gradient alone is always less noisy.", tuple(numbers))
    if all(map(below, whole.values())) and all(high < 0 for _, high in wholes):
        return Ruling(Status.HOLDS, "For the KL alone and for the whole objective.", tuple(numbers))
    smaller, larger = (sum(ends) for ends in zip(*((high < 0, low > 0) for low, high in wholes), strict=True))
    return Ruling(
        Status.ONLY_IF,
        "the gradient is that of the KL alone. Of the whole objective, which training follows, the "
        f"variance is smaller at {smaller} and larger at {larger} of {len(wholes)} snapshots of training; "
        "near the optimum of enumerated models it is much larger, as Monte Carlo's noise of the KL cancels "
        "that of the reward there.",
        tuple(numbers),
    )


def _ends(evidence: Evidence, term: str) -> list[tuple[float, float]]:
    """Intervals of the log of RaoBlackwell's variance relative to MonteCarlo's, at all snapshots."""
    findings = (found for one in evidence.policies for found in one.noise("RaoBlackwell"))
    ends = [tuple(found["interval"]) for found in findings if found["term"] == term]
    intervals = (one.interval() for one in _ratios(evidence.reviews_noise, term).values())
    return ends + [(one.low, one.high) for one in intervals if one is not None]


def _ratios(
    study: GradientStudy, term: str, estimator: str = "RaoBlackwell", control: str = "MonteCarlo"
) -> dict[str, Estimate]:
    """Log of an estimator's variance relative to the control's, by snapshot."""
    found = {}
    for one in study.snapshots:
        gram = NoiseSnapshot(one.step, one.gram, study.estimators).between(term, [estimator, control])
        found[one.label] = compare_gradient_variance(gram).log_ratio
    return found


def _rows(trained: Trained) -> Iterator[Number]:
    """Ratios to Monte Carlo: a row per estimator, term and β, with all snapshots."""
    for beta in sorted({found["beta"] for found in trained.noise("RaoBlackwell")}):
        for estimator, term in _SHOWN:
            found = [one for one in trained.noise(estimator) if (one["beta"], one["term"]) == (beta, term)]
            steps = (f"step {one['step']}: {ratio_ends(one['log_ratio'], *one['interval'])}" for one in found)
            yield Number(
                _title(estimator, _case(trained, term, beta)),
                _PUBLISHED if estimator == "RaoBlackwell" else "–",
                "; ".join(steps),
            )
    studies = (artifact for _, artifact in trained.sweep.studies(GradientStudy))
    for study in sorted(studies, key=lambda found: found.snapshots[0].beta):
        if set(_RELEASED) <= set(study.estimators):
            yield Number(
                f"released estimators, {_case(trained, 'total', study.snapshots[0].beta)}",
                _PUBLISHED,
                _ratios_text(_ratios(study, "total", *_RELEASED)),
            )


def _reviews(study: GradientStudy) -> Iterator[Number]:
    """The same for a policy on reviews, after each stage of its training."""
    case = f"reviews, β = {number(study.snapshots[0].beta, 1)}, {study.batches * study.prompts} prompts"
    for estimator, term in _SHOWN:
        ratios = {run_of(label): one for label, one in _ratios(study, term, estimator).items()}
        published = _PUBLISHED if estimator == "RaoBlackwell" else "–"
        yield Number(_title(estimator, f"{_TERMS[term]}, {case}"), published, _ratios_text(ratios))


def _norms(study: GradientStudy) -> Iterator[Number]:
    """The variance of the norm itself, of the KL's gradient, at the same policies."""
    for estimator, published in _NORMS.items():
        values = (
            NoiseSnapshot(one.step, one.gram, study.estimators).norm_variance("KL", estimator)
            for one in study.snapshots
        )
        labels = (run_of(one.label) for one in study.snapshots)
        text = "; ".join(f"{label}: {number(value)}" for label, value in zip(labels, values, strict=True))
        yield Number(f"variance of the norm, {estimator}, KL alone, reviews", published, text)


_SHOWN = (("RaoBlackwell", "KL"), ("RaoBlackwell", "total"), ("RaoBlackwellControlVariate", "total"))


def _title(estimator: str, case: str) -> str:
    return case if estimator == "RaoBlackwell" else f"{estimator} over MonteCarlo, {case}"


def _ratios_text(ratios: dict[str, Estimate]) -> str:
    return "; ".join(f"{label}: {ratio_text(one)}" for label, one in ratios.items())


def _case(trained: Trained, term: str, beta: float) -> str:
    return f"{_TERMS[term]}, {trained.title.split(',')[0]}, β = {number(beta, 1)}"


def noise_claim() -> PublishedClaim:
    """The claim."""
    return PublishedClaim(
        "rb-gradient-noise",
        "The gradient's noise: 59.90 against 45.44",
        "The variance of the gradient's norm is 59.90 with MC and 45.44 with RB.",
        Citation(
            "Amini, Vieira, Cotterell (2025), Better Estimation of the KL Divergence Between Language "
            "Models, arXiv:2504.10637",
            "The abstract, the introduction and the released code were read; these numbers only in a "
            "summary of the paper (papernotes.org).",
            "rycolab/kl-rb at 89cd8e065660",
        ),
        "`python -m replication study --config replication/configs/studies/identities.yaml`, `python -m "
        "replication study --config replication/configs/studies/imdb_gradient_noise.yaml`; the reports of "
        "the sweeps of replication/results that measure the noise.",
        "The summary calls the published numbers variances of the gradient's norm. Ours: ratios of traces "
        "of the covariance, RaoBlackwell over MonteCarlo unless another pair is named, of the KL alone and "
        "of the whole objective, on random enumerated models and at snapshots of training, reviews and the "
        "embedded world; on reviews also the variances of the norm. All are toys. In the sweep on reviews, "
        "RaoBlackwellControlVariate is an earlier estimator of that name, with a single coefficient.",
        _gradient_noise,
    )
