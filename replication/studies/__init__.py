"""Studies for `python -m lit_klrb study`.

Most are of models so small that every completion is enumerated; one is of the gradients of checkpoints.
"""

from .distillation import DistillationStudy as DistillationStudy
from .identities import IdentitiesStudy as IdentitiesStudy
from .off_policy import OffPolicyStudy as OffPolicyStudy
from .pair_gradients import PairGradientNoiseStudy as PairGradientNoiseStudy
from .pairs import EnumerablePair as EnumerablePair
from .pitfalls import PitfallsStudy as PitfallsStudy
