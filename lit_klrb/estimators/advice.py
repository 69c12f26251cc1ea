"""Which estimator to use when, from measurements that anyone can repeat."""

from typing import NamedTuple

from lit_klrb.estimators.base import KLEstimator
from lit_klrb.estimators.control_variate import RaoBlackwellControlVariate
from lit_klrb.estimators.tilted import TiltedRaoBlackwell
from lit_klrb.estimators.topk import RaoBlackwellTopK
from lit_klrb.estimators.unbiased import MonteCarlo, RaoBlackwell

# The estimator of `python -m lit_klrb fit` if none is given. Without a reward it equals RaoBlackwell.
DEFAULT = TiltedRaoBlackwell


class Advice(NamedTuple):
    """An estimator for one situation.

    Args:
        situation: What is trained.
        estimator: The estimator.
        reason: Why, with the document that has the measurements.
    """

    situation: str
    estimator: type[KLEstimator]
    reason: str


ADVICE = (
    Advice(
        "training with a reward (the default)",
        TiltedRaoBlackwell,
        "least noise where token counts predict the reward, otherwise that of RaoBlackwell; ends above "
        "MonteCarlo at tuned learning rates (docs/results.md)",
    ),
    Advice(
        "a reward that tokens hardly predict, and few steps near the optimum",
        RaoBlackwellControlVariate,
        "its coefficients shrink towards MonteCarlo; needs smaller learning rates (docs/control_variate.md)",
    ),
    Advice(
        "distillation, or a KL without a reward",
        RaoBlackwell,
        "the exact KL has a small fraction of MonteCarlo's noise (docs/topk.md); RaoBlackwellTokenValues has "
        "less far from the teacher (docs/control_variate.md)",
    ),
    Advice(
        "a teacher that sends only its most probable tokens",
        RaoBlackwellTopK,
        "unbiased for every k, with little more noise than RaoBlackwell (docs/topk.md)",
    ),
    Advice(
        "log-probabilities of the sampled tokens only",
        MonteCarlo,
        "needs no row of the vocabulary; never put k1, k2 or k3 in the loss instead (docs/certificates.md)",
    ),
)
