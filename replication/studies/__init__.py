"""Studies for `python -m replication study`.

Most are of models so small that every completion is enumerated; one is of the gradients of checkpoints.
"""

from .distillation import DistillationStudy as DistillationStudy
from .identities import IdentitiesStudy as IdentitiesStudy
from .model_pairs import CheckpointPair as CheckpointPair
from .off_policy import OffPolicyStudy as OffPolicyStudy
from .pair_estimation import PairEstimationStudy as PairEstimationStudy
from .pair_gradients import PairGradientNoiseStudy as PairGradientNoiseStudy
from .pairs import EnumerablePair as EnumerablePair
from .pitfalls import PitfallsStudy as PitfallsStudy
