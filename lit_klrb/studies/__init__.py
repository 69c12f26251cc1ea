"""Callbacks that measure a policy at several points of its training and write artifacts for `analysis`."""

from .estimation import EstimationStudy as EstimationStudy
from .gradient_noise import GradientNoiseStudy as GradientNoiseStudy
from .pitfalls import PitfallsStudy as PitfallsStudy
