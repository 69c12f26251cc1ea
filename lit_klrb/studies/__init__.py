"""Callbacks that measure a policy at moments of its training, and leave artifacts that `analysis` reads."""

from .estimation import EstimationStudy as EstimationStudy
from .gradient_noise import GradientNoiseStudy as GradientNoiseStudy
