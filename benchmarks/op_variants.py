"""The operation by this package, its Monte-Carlo equivalent, and plain autograd."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_klrb.functional import tiled_policy_loss, tiled_token_stats
from lit_klrb.functional.tiled.blocks import fused
from lit_klrb.functional.tiled.buffers import Buffers
from lit_klrb.functional.tiled.head import HeadGradients
from lit_klrb.functional.tiled.inputs import Pair, TiledInputs

from .op_case import Case, Outcome


@contextlib.contextmanager
def compiling(enabled: bool) -> Iterator[None]:
    """The tiled operations with or without the compiler."""
    before = os.environ.get("LIT_KLRB_COMPILE")
    os.environ["LIT_KLRB_COMPILE"] = str(int(enabled))
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIT_KLRB_COMPILE"]
        else:
            os.environ["LIT_KLRB_COMPILE"] = before


def finish(loss: Tensor, leaves: tuple[Tensor, Tensor], *statistics: Tensor | None) -> Outcome:
    """Backpropagate from the loss and collect the gradients."""
    loss.backward()
    gradients = tuple(leaf.grad for leaf in leaves)
    return Outcome(gradients, *(None if value is None else value.detach() for value in statistics))


def fused_loss(case: Case, tile_size: int | None = None, compile_body: bool = False) -> Outcome:
    """`tiled_policy_loss`, forward and backward."""
    leaves = hidden, weight = case.leaves()
    tokens = case.tokens[None]
    with compiling(compile_body):
        loss, stats = tiled_policy_loss(
            hidden[None],
            weight,
            case.ref_hidden[None],
            case.ref_weight,
            tokens,
            torch.ones_like(tokens, dtype=torch.bool),
            case.score_weights[None],
            case.kl_weights[None],
            tile_size=tile_size,
        )
        return finish(loss, leaves, *(field[0] for field in stats[:3]))


def recomputed_stats(case: Case, compile_body: bool = False) -> Outcome:
    """`tiled_token_stats`, forward and backward."""
    leaves = hidden, weight = case.leaves()
    with compiling(compile_body):
        stats = tiled_token_stats(
            hidden[None], weight, case.ref_hidden[None], case.ref_weight, case.tokens[None]
        )
        logprobs, ref_logprobs, kl = (field[0] for field in stats[:3])
        loss = (case.score_weights * logprobs + case.kl_weights * kl).sum()
        return finish(loss, leaves, logprobs, ref_logprobs, kl)


def floor(case: Case, dtype: torch.dtype) -> Callable[[], None]:
    """Only the four matrix products, 512 rows at a time, into allocated tensors."""
    hidden, weight, ref_hidden, ref_weight = (tensor.to(dtype) for tensor in case[:4])
    logits, ref_logits = (torch.ones(512, len(weight), dtype=dtype, device=weight.device) for _ in range(2))
    hidden_gradient, weight_gradient = torch.ones_like(hidden), torch.ones_like(weight)

    def products() -> None:
        for start in range(0, len(hidden), 512):
            rows = slice(start, start + 512)
            count = len(hidden[rows])
            torch.mm(hidden[rows], weight.T, out=logits[:count])
            torch.mm(ref_hidden[rows], ref_weight.T, out=ref_logits[:count])
            torch.mm(logits[:count], weight, out=hidden_gradient[rows])
            weight_gradient.addmm_(logits[:count].T, hidden[rows])

    return products


def masses(logits: Tensor) -> Tensor:
    """Largest logit and sum of exponentials, [N, 2]; the exponentials in place of the logits."""
    top = logits.amax(1, keepdim=True)
    return torch.stack([top[:, 0], logits.sub_(top).exp_().sum(1)], 1)


def weigh(exponentials: Tensor, factors: Tensor) -> None:
    """Compute the gradient from them in place; factors have shape [N, 1]."""
    exponentials.mul_(factors)


def monte_carlo(case: Case, with_reference: bool = True, compile_body: bool = False) -> Outcome:
    """`tiled_policy_loss` without the KL: only log-probabilities, built from the same parts."""
    pairs = [Pair(hidden[None], weight, None, None) for hidden, weight in (case[:2], case[2:4])]
    problem = TiledInputs.of(*pairs, case.tokens[None], None, 1.0, None, None, None, None)
    gradients = HeadGradients(problem.policy, problem.inputs, (True, True, False))
    buffers = problem.buffers(retain_blocks=True)
    with compiling(compile_body):
        tiles = [
            _monte_carlo_tile(problem, case.score_weights[rows], gradients, rows, buffers, with_reference)
            for rows in problem.tiles()
        ]
    hidden, weight, _ = gradients.finish(case.hidden.dtype)
    logprobs, *ref_logprobs = (torch.cat(field) for field in zip(*tiles, strict=True))
    return Outcome((hidden, weight), logprobs, *ref_logprobs)


def _monte_carlo_tile(
    problem: TiledInputs,
    score_weights: Tensor,
    gradients: HeadGradients,
    rows: slice,
    buffers: Buffers,
    with_reference: bool,
) -> list[Tensor]:
    inputs, tokens = problem.inputs[rows], problem.tokens[rows]
    masses_of, weigh_ = fused(masses, inputs.device), fused(weigh, inputs.device)
    sums, ref_sums = [], []
    for block in problem.policy.blocks():
        scratch, _, logits = buffers.block(len(inputs), block)
        weight = buffers.precise(problem.policy.weight[block])
        sums.append(masses_of(problem.policy.logits(inputs, weight, block, logits)))
        if with_reference:
            weight = buffers.precise(problem.reference.weight[block])
            ref_logits = problem.reference.logits(problem.ref_inputs[rows], weight, block, scratch)
            ref_sums.append(masses_of(ref_logits))
    top, normaliser = _normaliser(sums)
    factors = -(score_weights * (top - normaliser).exp()).to(inputs.dtype)
    for block, factor in zip(problem.policy.blocks(), factors, strict=True):
        _, _, gradient = buffers.block(len(inputs), block)
        weigh_(gradient, factor[:, None])
        gradients.add(gradient, buffers.precise(problem.policy.weight[block]), rows, block)
    gradients.add_tokens(score_weights, tokens, rows)
    logprobs = [problem.policy.token_logits(inputs, tokens) - normaliser]
    if with_reference:
        ref_logits = problem.reference.token_logits(problem.ref_inputs[rows], tokens)
        logprobs.append(ref_logits - _normaliser(ref_sums)[1])
    return logprobs


def _normaliser(sums: list[Tensor]) -> tuple[Tensor, Tensor]:
    top, mass = torch.stack(sums).double().unbind(2)
    return top, (top + mass.log()).logsumexp(0)


def _whole_logprobs(hidden: Tensor, weight: Tensor, upcast: bool) -> Tensor:
    logits = hidden @ weight.T
    return (logits.float() if upcast else logits).log_softmax(-1)


def plain_monte_carlo(case: Case, with_reference: bool = True) -> Outcome:
    """Log-softmax of full float32 logits of both models, the reference's without a graph."""
    leaves, index = case.leaves(), case.tokens[:, None]
    logprobs = _whole_logprobs(*leaves, upcast=True).gather(-1, index)[:, 0]
    ref_logprobs = None
    if with_reference:
        ref_logprobs = _whole_logprobs(case.ref_hidden, case.ref_weight, upcast=True).gather(-1, index)[:, 0]
    return finish((case.score_weights * logprobs).sum(), leaves, logprobs, ref_logprobs)


def plain_rao_blackwell(case: Case, upcast: bool) -> Outcome:
    """Softmaxes of full logits of both models, in their dtype as in the released code, or in float32."""
    leaves, index = case.leaves(), case.tokens[:, None]
    policy = _whole_logprobs(*leaves, upcast=upcast)
    reference = _whole_logprobs(case.ref_hidden, case.ref_weight, upcast=upcast)
    kl = (policy.exp() * (policy - reference)).sum(-1)
    logprobs, ref_logprobs = (whole.gather(-1, index)[:, 0] for whole in (policy, reference))
    loss = (case.score_weights * logprobs + case.kl_weights * kl).sum()
    return finish(loss, leaves, logprobs, ref_logprobs, kl)


def checkpointed(case: Case) -> Outcome:
    """Plain float32 tiles of 256 rows under activation checkpointing."""
    hidden, weight = leaves = case.leaves()

    def tile(rows: Tensor, head: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        policy = (rows.float() @ head.float().T).log_softmax(-1)
        reference = (case.ref_hidden[part].float() @ case.ref_weight.float().T).log_softmax(-1)
        kl = (policy.exp() * (policy - reference)).sum(-1)
        index = case.tokens[part, None]
        return policy.gather(-1, index)[:, 0], reference.gather(-1, index)[:, 0], kl

    parts = [slice(start, start + 256) for start in range(0, len(hidden), 256)]
    tiles = [checkpoint(tile, hidden[part], weight, part, use_reentrant=False) for part in parts]
    logprobs, ref_logprobs, kl = (torch.cat(field) for field in zip(*tiles, strict=True))
    loss = (case.score_weights * logprobs + case.kl_weights * kl).sum()
    return finish(loss, leaves, logprobs, ref_logprobs, kl)
