"""The share of evaluation noise in the variance of a matched pair's difference."""

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.stats.evaluation_noise import NoiseShare, noise_share
from analysis.stats.matching import matched_evaluations
from analysis.stats.pairs import Pairs

# The key of the share over all betas.
_ALL = "all"


def evaluation_noise(assessment: Assessment) -> Section | None:
    """The share for each comparison, over all betas and at each; None without values per prompt."""
    found = {c.pairs.treatment: _shares(assessment, c.pairs) for c in assessment.comparisons}
    found = {name: shares for name, shares in found.items() if shares}
    if not found:
        return None
    told = ", ".join(f"{shares[_ALL]} for {name}" for name, shares in found.items())
    outcome = assessment.sweep.plan.primary.symbol
    betas = {str(index): f"{beta:g}" for index, beta in assessment.sweep.plan.grid.beta.items()}
    return Section(
        "evaluation_noise",
        "Noise of the evaluation",
        paragraphs=[
            f"Of the variance of a matched pair's difference in {outcome}, this share is noise of the "
            f"evaluation, with its 95% interval: {told}. More prompts in the evaluation, or more completions "
            "per prompt, reduce it; the rest differs between runs, and only more replicates average it out."
        ],
        details=[
            Table(
                "Share of evaluation noise in the variance of a matched pair's difference, from the pairs' "
                "differences per prompt, with its 95% interval. At a single β it rests on few replicates.",
                ("Arm", "β", "Share"),
                [
                    (name, betas.get(key, "all"), str(share))
                    for name, shares in found.items()
                    for key, share in shares.items()
                ],
            )
        ],
        numbers={
            name: {
                key: {"share": share.value, "interval": share.interval.ends} for key, share in shares.items()
            }
            for name, shares in found.items()
        },
    )


def _shares(assessment: Assessment, pairs: Pairs) -> dict[str, NoiseShare]:
    """Index of beta, or "all" -> share; empty if it cannot be estimated."""
    differences = matched_evaluations(assessment.sweep, pairs)
    shares = {str(index): noise_share([values]) for index, values in differences.items()}
    shares[_ALL] = noise_share(list(differences.values()))
    return {key: share for key, share in shares.items() if share is not None}
