"""Callbacks of `fit` that measure the policy at snapshots of training, and write artifacts for `analysis`."""

from .estimation import EstimationStudy as EstimationStudy
from .gradient_noise import GradientNoiseStudy as GradientNoiseStudy

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
