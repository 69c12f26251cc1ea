"""The closest equivalents of the operation in TRL and Liger; imported only when run."""

import torch
from torch import Tensor

from .op_case import Case, Outcome
from .op_variants import finish

_GRPO_BETA = 0.05


def trl_selective(case: Case) -> Outcome:
    """TRL's `selective_log_softmax` of full logits, both models."""
    from trl.trainer.utils import selective_log_softmax

    hidden, weight = leaves = case.leaves()
    tokens = case.tokens[None]
    logprobs = selective_log_softmax((hidden @ weight.T)[None], tokens)[0]
    ref_logprobs = selective_log_softmax((case.ref_hidden @ case.ref_weight.T)[None], tokens)[0]
    return finish((case.score_weights * logprobs).sum(), leaves, logprobs, ref_logprobs)


def _trl_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    from trl.kernels.chunked_divergence import VOCAB_CHUNK_SIZE
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, tokens, 1.0, VOCAB_CHUNK_SIZE, None, 1.0, ())[0]


def trl_chunked_logprob(case: Case) -> Outcome:
    """TRL's chunked log-probabilities from hidden states, both models."""
    leaves = case.leaves()
    logprobs = _trl_logprobs(*leaves, case.tokens)
    ref_logprobs = _trl_logprobs(case.ref_hidden, case.ref_weight, case.tokens)
    return finish((case.score_weights * logprobs).sum(), leaves, logprobs, ref_logprobs)


def trl_chunked_divergence(case: Case) -> Outcome:
    """TRL's chunked divergence (per-token reverse KL) and log-probabilities: the same loss as ours."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    leaves = case.leaves()
    logprobs = _trl_logprobs(*leaves, case.tokens)
    kl, _ = ChunkedDivergenceFunction.apply(*leaves, None, case.ref_hidden, case.ref_weight, None, 1.0)
    return finish((case.score_weights * logprobs + case.kl_weights * kl).sum(), leaves, logprobs, None, kl)


def liger_jsd(case: Case) -> Outcome:
    """Liger's fused linear JSD with the parameter that gives the batch mean of KL(policy || reference)."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    leaves = case.leaves()
    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0)
    return finish(loss(*leaves, case.ref_hidden, case.ref_weight, case.tokens), leaves)


def grpo_score_weights(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The weights of the gradients of log-probabilities in the loss below: advantage and k3's derivative."""
    return (-1 - _GRPO_BETA * torch.expm1(ref_logprobs - logprobs)) / len(logprobs)


def liger_grpo(case: Case) -> Outcome:
    """Liger's fused linear GRPO: log-probabilities of both models, k3 in the loss."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, weight = leaves = case.leaves()
    count = len(case.tokens)
    loss = LigerFusedLinearGRPOLoss(beta=_GRPO_BETA, loss_type="grpo", use_ref_model=True)
    value, _ = loss(
        hidden[None],
        weight,
        case.tokens[None],
        torch.ones(1, count, device=hidden.device),
        torch.ones(1, device=hidden.device),
        ref_input=case.ref_hidden[None],
        ref_weight=case.ref_weight,
    )
    return finish(value, leaves)
