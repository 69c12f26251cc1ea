"""Token statistics and policy loss from hidden states and heads, tile by tile, without [B, T, V] logits."""

from .logprobs import tiled_logprobs as tiled_logprobs
from .loss import tiled_policy_loss as tiled_policy_loss
from .stats import tiled_token_stats as tiled_token_stats

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
