"""Token statistics and the policy loss from hidden states and heads, tile by tile: no [B, T, V] tensor."""

from .loss import tiled_policy_loss as tiled_policy_loss
from .stats import tiled_token_stats as tiled_token_stats
