"""Which estimator to use when, from measurements that anyone can repeat."""

from typing import NamedTuple

from lit_klrb.estimators.base import KLEstimator
from lit_klrb.estimators.control_variate import RaoBlackwellControlVariate
from lit_klrb.estimators.tilted import TiltedRaoBlackwell
from lit_klrb.estimators.topk import RaoBlackwellTopK
from lit_klrb.estimators.unbiased import MonteCarlo, RaoBlackwell

# The estimators of `lit-klrb fit` if none is given, for modules with a reward and without.
DEFAULT, WITHOUT_REWARD = RaoBlackwellControlVariate, RaoBlackwell
# The discount of the latter at the first and the last step.
ANNEALED = 0.0, 1.0


class Advice(NamedTuple):
    """An estimator for one situation."""

    situation: str  # what is trained
    estimator: type[KLEstimator]
    reason: str  # why, with the document that has the measurements


ADVICE = (
    Advice(
        "training with a reward (the default)",
        RaoBlackwellControlVariate,
        "small models of reviews ended at 4.71 in reward - beta KL with it and at 3.58 with MonteCarlo; on "
        "SmolLM2 no difference was found, but with model.prefix_reward_every a clear gain in 1 of 9 "
        "comparisons (docs/results.md)",
    ),
    Advice(
        "a reward that is nearly a sum over tokens",
        TiltedRaoBlackwell,
        "on a toy with such a reward it ended 0.063 above MonteCarlo, 0.034 to 0.093 "
        "(replication/results/noise)",
    ),
    Advice(
        "distillation, or a KL without a reward",
        RaoBlackwell,
        "the exact KL has a small fraction of MonteCarlo's noise; distillation's default is a "
        "discount from 0 to 1 over the run, which ended lowest on reviews (docs/results.md)",
    ),
    Advice(
        "a teacher that sends only its most probable tokens",
        RaoBlackwellTopK,
        "unbiased for every k; with 64 of 239 tokens it had 1.02 times RaoBlackwell's variance "
        "(replication/evidence/topk.md)",
    ),
    Advice(
        "log-probabilities of the sampled tokens only",
        MonteCarlo,
        "needs no row of the vocabulary; never put k1, k2 or k3 in the loss instead (docs/faq.md)",
    ),
)
