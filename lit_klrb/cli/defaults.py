"""The KL estimator of runs that name none."""

from typing import Any

from lit_klrb.estimators.advice import ANNEALED, DEFAULT, WITHOUT_REWARD
from lit_klrb.modules import DistillModule

PACKAGE = "lit_klrb.estimators"
# The value of the parser: the default of modules with a reward
WITH_REWARD = {"class_path": f"{PACKAGE}.{DEFAULT.__name__}"}
# Options that are put in front of those of modules without a reward; later ones and files replace them
OPTIONS_WITHOUT_REWARD = (
    f"--kl.estimator={PACKAGE}.{WITHOUT_REWARD.__name__}",
    f"--kl.estimator.discount={ANNEALED[0]}",
    f"--kl.final_discount={ANNEALED[1]}",
)


def default_options(given: dict[str, Any]) -> tuple[str, ...]:
    """Options with the default estimator of the module, if that is another one than the parser's."""
    without_reward = str(given.get("model")).rpartition(".")[2] == DistillModule.__name__
    named = given.get("kl") or given.get("kl.estimator")
    return OPTIONS_WITHOUT_REWARD if without_reward and not named else ()
