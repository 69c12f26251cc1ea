"""Measurements that write artifacts for `analysis`: callbacks at snapshots of a training, and studies.

A `PolicyStudy` is a callback of `fit`; a `Study` is run by `python -m lit_klrb study`.
"""

from .distillation import DistillationStudy as DistillationStudy
from .estimation import EstimationStudy as EstimationStudy, PairEstimationStudy as PairEstimationStudy
from .gradient_noise import GradientNoiseStudy as GradientNoiseStudy
from .identities import IdentitiesStudy as IdentitiesStudy
from .off_policy import OffPolicyStudy as OffPolicyStudy
from .pair_gradients import PairGradientNoiseStudy as PairGradientNoiseStudy
from .pairs import CheckpointPair as CheckpointPair, EnumerablePair as EnumerablePair, ModelPair as ModelPair
from .pitfalls import PitfallsStudy as PitfallsStudy
from .study import Study as Study

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
