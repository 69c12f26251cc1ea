"""Functions from tensors to tensors, which need torch alone.

`token_stats` gives the statistics of each token that estimators use, `tiled_token_stats` the same without
the logits of a batch, and `tiled_policy_loss` the loss of a training step. `kl_values` has all estimates of
the KL.
"""

from .baselines import (
    leave_one_out_baseline as leave_one_out_baseline,
)
from .credit import (
    ImportanceWeights as ImportanceWeights,
    RatioCap as RatioCap,
    assign_credit as assign_credit,
    effective_share as effective_share,
    importance_weights as importance_weights,
    reward_to_go as reward_to_go,
)
from .kl import (
    cross_fitted_control_variate as cross_fitted_control_variate,
    fit_control_variate as fit_control_variate,
    horvitz_thompson as horvitz_thompson,
    kl_control_variate as kl_control_variate,
    kl_k1_per_token as kl_k1_per_token,
    kl_k2_per_token as kl_k2_per_token,
    kl_k3_increments as kl_k3_increments,
    kl_k3_per_token as kl_k3_per_token,
    kl_values as kl_values,
)
from .logprobs import (
    TokenStats as TokenStats,
    TopK as TopK,
    served_stats as served_stats,
    token_stats as token_stats,
)
from .statistics import clustered_mean as clustered_mean
from .surrogate import clipped_loss as clipped_loss, weighted_loss as weighted_loss
from .tiled import (
    tiled_logprobs as tiled_logprobs,
    tiled_policy_loss as tiled_policy_loss,
    tiled_token_stats as tiled_token_stats,
)
from .topk import kl_topk as kl_topk

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
