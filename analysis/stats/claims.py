"""The claims that are tested, and how verdicts word them."""

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Claim:
    """The claim of one test, and how verdicts word it."""

    key: str  # short name, such as "objective"
    subject: str  # the quantity compared, treatment minus control
    favourable: str  # completes "the treatment has ..." if the test rejects in its favour
    unfavourable: str  # the same if the test rejects against it
    higher_is_better: bool = True  # whether a positive estimate favours the treatment
    unit_of_n: str = "replicate"  # the unit that n counts


_lower = partial(Claim, higher_is_better=False)

OBJECTIVE = Claim("objective", "J = reward − β·KL", "higher J = reward − β·KL", "lower J = reward − β·KL")
KL_DECIDES = _lower("kl", "the KL", "a lower KL", "a higher KL")
KL = _lower("kl", "the KL itself", "a lower KL", "a higher KL")
REWARD = Claim("reward", "the reward itself", "more reward", "less reward")


def spread_of(symbol: str) -> Claim:
    """The claim on the spread between runs of an arm, in what decides."""
    spread = f"spread of {symbol} between replicates"
    return _lower("spread", f"the {spread}", f"less {spread}", f"more {spread}")
