"""The KL estimator of runs that name none."""

import re
from collections.abc import Sequence
from typing import Any

from lit_klrb.estimators.advice import ANNEALED, DEFAULT, WITHOUT_REWARD

PACKAGE = "lit_klrb.estimators"
# The value of the parser: the default of modules with a reward
WITH_REWARD = {"class_path": f"{PACKAGE}.{DEFAULT.__name__}"}
# Options that are put in front of those of modules without a reward
OPTIONS_WITHOUT_REWARD = (
    f"--kl.estimator={PACKAGE}.{WITHOUT_REWARD.__name__}",
    f"--kl.estimator.discount={ANNEALED[0]}",
    f"--kl.final_discount={ANNEALED[1]}",
)


def names_estimator(words: Sequence[str], files: Sequence[Any]) -> bool:
    """Whether options or configuration files name the estimator's class, rather than its settings only.

    Args:
        words: The command line.
        files: Contents of configuration files.

    Example:
        >>> names_estimator(["--kl.estimator.baseline", "null"], [{"kl": {"beta": 1.0}}])
        False
        >>> names_estimator([], [{"kl": {"estimator": "MonteCarlo"}}])
        True
    """
    if any(re.match(r"--kl(\.estimator(\.class_path)?)?(=|$)", word) for word in words):
        return True
    sections = [file.get("kl") for file in files if isinstance(file, dict)]
    named = [section.get("estimator") for section in sections if isinstance(section, dict)]
    return any(isinstance(one, str) or (isinstance(one, dict) and "class_path" in one) for one in named)
