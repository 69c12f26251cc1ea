"""Measurements that write artifacts for `analysis`: callbacks at snapshots of a training, and studies.

A `PolicyStudy` is a callback of `fit`; a `Study` is run by `python -m lit_klrb study`.
"""

from .base import Study as Study
from .estimation import EstimationStudy as EstimationStudy, PairEstimationStudy as PairEstimationStudy
from .gradient_noise import GradientNoiseStudy as GradientNoiseStudy
from .pairs import CheckpointPair as CheckpointPair, ModelPair as ModelPair

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
