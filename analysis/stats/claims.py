"""The claims that are tested, and how verdicts word them."""

import math
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Claim:
    """The claim of one test, and how verdicts word it."""

    key: str  # short name, such as "objective"
    subject: str  # the quantity compared, treatment minus control
    favourable: str  # completes "the treatment has ..." if the test rejects in its favour
    unfavourable: str  # the same if the test rejects against it
    caveat: str = ""  # a sentence added to every conclusion from this claim, or ""
    higher_is_better: bool = True  # whether a positive estimate favours the treatment
    bounds: tuple[float, float] = (-math.inf, math.inf)  # range of the estimate; intervals are clipped to it
    unit_of_n: str = "replicate"  # the unit that n counts


_NOT_THE_AIM = "What training maximises is J, of which this is a part."
_SHARE_CAVEAT = (
    "A larger share also comes from a larger spread between runs; it does not make an estimator better."
)
_lower = partial(Claim, higher_is_better=False)
_difference = partial(Claim, bounds=(-1, 1))

OBJECTIVE = Claim("objective", "J = reward − β·KL", "higher J = reward − β·KL", "lower J = reward − β·KL")
KL_DECIDES = _lower("kl", "the KL", "a lower KL", "a higher KL")
MATCHED_KL = Claim(
    "matched_kl", "reward at matched KL", "more reward at matched KL", "less reward at matched KL"
)
KL = _lower("kl", "the KL itself", "a lower KL", "a higher KL", _NOT_THE_AIM)
REWARD = Claim("reward", "the reward itself", "more reward", "less reward", _NOT_THE_AIM)
FRONTIER_SHARE = Claim(
    *("frontier_share", "the share of the frontier", "more frontier points", "fewer frontier points"),
    _SHARE_CAVEAT,
)
REPLICATE_SHARE = _difference(
    *("replicate_share", "the share of each replicate's frontier"),
    *("more frontier points within replicates", "fewer frontier points within replicates"),
)
NET_DOMINANCE = _difference(
    *("net_dominance", "net dominance over all pairs of replicates"),
    *("more net dominance", "less net dominance"),
)
MATCHED_DOMINANCE = _difference(
    *("matched_dominance", "dominance within matched pairs"),
    *("more dominant runs within matched pairs", "fewer dominant runs within matched pairs"),
)
HYPERVOLUME = Claim("hypervolume", "the hypervolume", "more hypervolume", "less hypervolume")
OF_FRONTIER = (KL, REWARD, FRONTIER_SHARE, REPLICATE_SHARE, NET_DOMINANCE, MATCHED_DOMINANCE, HYPERVOLUME)
COLLAPSES = _lower(
    "collapses", "runs that diverged alone in their pair", "fewer diverged runs", "more diverged runs"
)


def of_curves(metric: str, what: str) -> tuple[Claim, Claim, Claim]:
    """The claims on a metric's curves: spread between replicates, on average and at any step, and roughness.

    Roughness is within runs, as opposed to spread between runs.
    """
    spread, rough = f"spread of {what} between replicates", f"the roughness of {what} within runs"
    return (
        _lower(f"spread_{metric}", f"the {spread}", f"less {spread}", f"more {spread}"),
        _lower(
            *(f"spread_{metric}_at_any_step", f"the {spread}, at the step where it differs most"),
            *(f"less {spread} at some step", f"more {spread} at some step"),
        ),
        _lower(f"roughness_{metric}", rough, f"smoother runs in {what}", f"rougher runs in {what}"),
    )
