"""KL estimators with a common interface: a detached score weight and a differentiable term each."""

from .base import KLEstimator as KLEstimator
from .biased import (
    CoarsenedTopK as CoarsenedTopK,
    K1Loss as K1Loss,
    K2Loss as K2Loss,
    K3Loss as K3Loss,
    K3LossSequence as K3LossSequence,
    K3Reward as K3Reward,
    RaoBlackwellLoss as RaoBlackwellLoss,
    RaoBlackwellReward as RaoBlackwellReward,
)
from .composed import ComposedEstimator as ComposedEstimator
from .control_variate import RaoBlackwellControlVariate as RaoBlackwellControlVariate
from .labels import Explanation as Explanation
from .memory import EstimatorMemory as EstimatorMemory
from .recipe import Recipe as Recipe, Term as Term
from .released import ReleasedMonteCarlo as ReleasedMonteCarlo, ReleasedRaoBlackwell as ReleasedRaoBlackwell
from .shapes import LossWeights as LossWeights
from .tilted import TiltedRaoBlackwell as TiltedRaoBlackwell
from .topk import RaoBlackwellTopK as RaoBlackwellTopK
from .unbiased import (
    MonteCarlo as MonteCarlo,
    MonteCarloRewardToGo as MonteCarloRewardToGo,
    NoKL as NoKL,
    RaoBlackwell as RaoBlackwell,
    RaoBlackwellLite as RaoBlackwellLite,
    RaoBlackwellSequence as RaoBlackwellSequence,
)

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
