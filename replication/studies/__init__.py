"""Studies of models so small that every completion is enumerated, for `python -m lit_klrb study`."""

from .distillation import DistillationStudy as DistillationStudy
from .identities import IdentitiesStudy as IdentitiesStudy
from .off_policy import OffPolicyStudy as OffPolicyStudy
from .pairs import EnumerablePair as EnumerablePair
from .pitfalls import PitfallsStudy as PitfallsStudy
