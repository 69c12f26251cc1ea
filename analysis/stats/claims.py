"""The claims that are tested, and how verdicts word them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """The claim of one test, and how verdicts word it.

    Attributes:
        key: Short name, such as "objective".
        subject: The quantity compared, treatment minus control.
        favourable: Completes "the treatment has ..." if the test rejects in its favour.
        unfavourable: The same if the test rejects against it.
        caveat: A sentence added to every conclusion from this claim, or "".
        primary: Whether the claim can support "better" or "worse".
        higher_is_better: Whether a positive estimate favours the treatment.
        bounds: Range of the estimate; intervals are clipped to it.
        unit_of_n: The unit that n counts.
    """

    key: str
    subject: str
    favourable: str
    unfavourable: str
    caveat: str = ""
    primary: bool = False
    higher_is_better: bool = True
    bounds: tuple[float, float] = (-math.inf, math.inf)
    unit_of_n: str = "replicate"


_NOT_THE_AIM = "What training maximises is J, of which this is a part."
_SHARE_CAVEAT = (
    "A larger share also comes from a larger spread between runs; it does not make an estimator better."
)

OBJECTIVE = Claim(
    "objective", "J = reward − β·KL", "higher J = reward − β·KL", "lower J = reward − β·KL", primary=True
)
KL_DECIDES = Claim("kl", "the KL", "a lower KL", "a higher KL", primary=True, higher_is_better=False)
MATCHED_KL = Claim(
    "matched_kl", "reward at matched KL", "more reward at matched KL", "less reward at matched KL"
)
KL = Claim("kl", "the KL itself", "a lower KL", "a higher KL", caveat=_NOT_THE_AIM, higher_is_better=False)
REWARD = Claim("reward", "the reward itself", "more reward", "less reward", caveat=_NOT_THE_AIM)
FRONTIER_SHARE = Claim(
    "frontier_share",
    "the share of the frontier",
    "more frontier points",
    "fewer frontier points",
    caveat=_SHARE_CAVEAT,
)
REPLICATE_SHARE = Claim(
    "replicate_share",
    "the share of each replicate's frontier",
    "more frontier points within replicates",
    "fewer frontier points within replicates",
    bounds=(-1, 1),
)
NET_DOMINANCE = Claim(
    "net_dominance",
    "net dominance over all pairs of replicates",
    "more net dominance",
    "less net dominance",
    bounds=(-1, 1),
)
MATCHED_DOMINANCE = Claim(
    "matched_dominance",
    "dominance within matched pairs",
    "more dominant runs within matched pairs",
    "fewer dominant runs within matched pairs",
    bounds=(-1, 1),
)
HYPERVOLUME = Claim("hypervolume", "the hypervolume", "more hypervolume", "less hypervolume")
COLLAPSES = Claim(
    "collapses",
    "runs that diverged alone in their pair",
    "fewer diverged runs",
    "more diverged runs",
    higher_is_better=False,
)


def of_curves(metric: str, what: str) -> tuple[Claim, Claim, Claim]:
    """The claims on a metric's curves: spread between replicates, on average and at any step, and roughness.

    Roughness is within runs, as opposed to spread between runs.
    """
    spread = f"spread of {what} between replicates"
    words = (
        ("spread_{}", f"the {spread}", f"less {spread}", f"more {spread}"),
        (
            "spread_{}_at_any_step",
            f"the {spread}, at the step where it differs most",
            f"less {spread} at some step",
            f"more {spread} at some step",
        ),
        (
            "roughness_{}",
            f"the roughness of {what} within runs",
            f"smoother runs in {what}",
            f"rougher runs in {what}",
        ),
    )
    first, second, third = (
        Claim(key.format(metric), subject, favourable, unfavourable, higher_is_better=False)
        for key, subject, favourable, unfavourable in words
    )
    return first, second, third
