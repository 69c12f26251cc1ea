"""The Lightning modules, which connect models, data and losses, and log."""

from .distill import DistillModule as DistillModule
from .dpo import DPOModule as DPOModule
from .reward import PairwiseRewardModule as PairwiseRewardModule, RewardModule as RewardModule
from .rloo import RLOOModule as RLOOModule
from .sft import SFTModule as SFTModule

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
