"""Training in several processes (DDP, FSDP2)."""

from .fsdp2 import FSDP2 as FSDP2, sharding_mesh as sharding_mesh
from .gathering import (
    LOST as LOST,
    gather as gather,
    gather_rows as gather_rows,
    is_lost as is_lost,
    own_rows as own_rows,
    rank_slice as rank_slice,
    stacked as stacked,
    stacked_stats as stacked_stats,
    whole as whole,
    world_size as world_size,
)
from .launchers import (
    check_started as check_started,
    check_strategy as check_strategy,
    cluster_plugins as cluster_plugins,
)
