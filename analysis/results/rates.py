"""The tuning stage of a plan."""

import math
from dataclasses import dataclass

from analysis.results.checks import require

# The name of the stage.
TUNING = "tuning"
# Smallest number of rates, so that one can be inside the grid, and of replicates, so that they have a spread.
_FEWEST_RATES, _FEWEST_REPLICATES = 3, 2


@dataclass(frozen=True)
class Tuning:
    """Runs of every arm at every rate and beta, from which one rate is chosen for each arm.

    Args:
        rates: The rates, the same for all arms.
        replicates: Runs at each rate and beta, with seeds of their own.
        key: The configuration key of the rate.
    """

    rates: list[float]
    replicates: int = 4
    key: str = "model.init_args.learning_rate"

    def check(self) -> None:
        """Check the values beyond their types.

        Raises:
            ConfigurationError: If a value is not allowed.
        """
        positive = all(math.isfinite(rate) and rate > 0 for rate in self.rates)
        enough = len(set(self.rates)) >= max(_FEWEST_RATES, len(self.rates))
        allowed = f"at least {_FEWEST_RATES} different numbers > 0"
        require(positive and enough, "tuning.rates", self.rates, allowed)
        whole = type(self.replicates) is int and self.replicates >= _FEWEST_REPLICATES
        require(whole, "tuning.replicates", self.replicates, f"integers >= {_FEWEST_REPLICATES}")
