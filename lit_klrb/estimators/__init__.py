"""KL estimators: each a pair of a detached score weight and a differentiable term, all with one interface."""

from .base import Explanation as Explanation, KLEstimator as KLEstimator, LinearLoss as LinearLoss
from .control_variate import RaoBlackwellControlVariate as RaoBlackwellControlVariate
from .released import ReleasedMonteCarlo as ReleasedMonteCarlo, ReleasedRaoBlackwell as ReleasedRaoBlackwell
from .unbiased import MonteCarlo as MonteCarlo, NoKL as NoKL, RaoBlackwell as RaoBlackwell
