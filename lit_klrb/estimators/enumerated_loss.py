"""Expected values and gradients of estimators and of KL losses, by enumeration of small models."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.functional.enumeration import TabularLM, exact_kl, exact_kl_gradient, num_prefixes

KL_LEVELS = (0.01, 0.3, 3.0)


def policy_at_kl(reference: TabularLM, direction: Tensor, kl: float) -> TabularLM:
    """The policy with the given KL to the reference, along a direction of logits, found by bisection."""
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        policy = TabularLM(reference.logits + middle * direction, reference.max_length)
        low, high = (middle, high) if exact_kl(policy, reference) < kl else (low, middle)
    return policy


# Tokens (EOS included), positions and KL of each pair of models. Heads of the vocabulary show with more
# tokens, credit for part of the later tokens with more positions, and clamps where log ratios reach 50.
SIZES = (*((3, 3, kl) for kl in KL_LEVELS), (6, 2, 0.3), (3, 4, 0.3), (3, 3, 60.0))
# The pair with which batches and padding are examined.
EXAMINED = 1
# How far the reference of the last pair is from the other side of the policy, in logits.
_APART = 15.0
KNOWN = ("kl", "kl_own_token", "reverse", "reverse_own_token", "jsd_own_token", "chi2_own_token")


class LossError(Exception):
    """A loss raised an exception, or its value or gradient is not finite."""


class LossInputs(NamedTuple):
    """A batch of completions of one prompt; outside the mask, tokens and logits are random."""

    logits: Tensor  # policy, shape [B, T, V], float64; differentiable in a loss
    ref_logits: Tensor  # reference, shape [B, T, V]
    old_logits: Tensor  # the policy that the completions are samples from, shape [B, T, V]
    tokens: Tensor  # completions, shape [B, T]
    mask: Tensor  # true on tokens of a completion, EOS included, shape [B, T]


Loss = Callable[[LossInputs], Tensor]


class EnumeratedModels(NamedTuple):
    """A policy, its reference, and the policy that completions are from."""

    policy: TabularLM
    reference: TabularLM
    behaviour: TabularLM


class Expected(NamedTuple):
    """Expected gradients, [contexts, V]: of the loss, and of the loss times its tokens per completion."""

    plain: Tensor
    by_tokens: Tensor
    size: float
    padding: float


@functools.cache
def worlds(off_policy: bool) -> tuple[EnumeratedModels, ...]:
    """Models of each of `SIZES`; off-policy, completions are from another policy."""
    models = []
    for vocabulary, length, kl in SIZES:
        generator = torch.Generator().manual_seed(1)  # of a direction along which the KL reaches 3 nats
        shape = (3, num_prefixes(vocabulary, length), vocabulary)
        table, direction, step = torch.randn(shape, dtype=torch.float64, generator=generator)
        apart = _APART if kl > max(KL_LEVELS) else 0.0
        reference = TabularLM(table - apart * direction, length)
        policy = policy_at_kl(reference, direction, kl)
        behaviour = TabularLM(policy.logits + step / 2, length) if off_policy else policy
        models.append(EnumeratedModels(policy, reference, behaviour))
    return tuple(models)


def expected_gradient(
    loss: Loss, world: EnumeratedModels, size: int, takes_mask: bool, padding: int = 1
) -> Expected:
    """The expected gradient over all batches of `size` completions."""
    tokens, mask = world.policy.sequences()
    chances = world.behaviour.logprobs(tokens, mask).exp().detach()
    full, kept = padded(world, padding)
    batches = torch.cartesian_prod(*[torch.arange(len(tokens))] * size).view(-1, size)
    weights = chances[batches].prod(-1).tolist()
    lengths = kept.sum(-1)[batches]
    plain, by_tokens = torch.zeros_like(full.logits), torch.zeros_like(full.logits)
    # A graph per batch: one of all batches together would be walked through for each of the two sums
    for rows, weight, counts in zip(batches, weights, lengths.tolist(), strict=True):
        width = full.tokens.shape[1] if takes_mask else max(counts)
        inputs = LossInputs(*(field[rows, :width] for field in full))
        leaf = inputs.logits.requires_grad_()
        value = loss(inputs)
        if not value.isfinite():
            raise LossError(f"the loss is {value.item()} for completions of {counts} tokens")
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, leaf, materialize_grads=True)
            plain[:, :width].index_add_(0, rows, gradient, alpha=weight)
            by_tokens[:, :width].index_add_(0, rows, gradient, alpha=weight * sum(counts) / size)
    if not (plain.isfinite().all() and by_tokens.isfinite().all()):
        raise LossError("the gradient of the loss is not finite")
    contexts = world.policy.prefixes(tokens)[mask] % len(world.policy.logits)
    empty = torch.zeros_like(world.policy.logits)
    tables = [empty.index_add(0, contexts, gradient[kept]) for gradient in (plain, by_tokens)]
    return Expected(tables[0], tables[1], plain[kept].abs().sum().item(), plain[~kept].abs().sum().item())


def padded(world: EnumeratedModels, padding: int) -> tuple[LossInputs, Tensor]:
    """All completions, with `padding` more positions than the longest; random numbers outside the mask."""
    tokens, mask = world.policy.sequences()
    generator = torch.Generator().manual_seed(padding)
    count, width = len(tokens), world.policy.max_length + padding
    vocabulary = world.policy.logits.shape[1]
    kept = torch.zeros(count, width, dtype=torch.bool)
    kept[:, : world.policy.max_length] = mask
    padded_tokens = torch.randint(vocabulary, (count, width), generator=generator)
    padded_tokens[kept] = tokens[mask]

    def logits(model: TabularLM) -> Tensor:
        junk = 5 * torch.randn(count, width, vocabulary, dtype=torch.float64, generator=generator)
        junk[kept] = model.token_logits(tokens)[mask]
        return junk

    policy, reference = logits(world.policy), logits(world.reference)
    old = policy.clone() if world.behaviour is world.policy else logits(world.behaviour)
    return LossInputs(policy, reference, old, padded_tokens, kept), kept


def known_gradients(policy: TabularLM, reference: TabularLM, behaviour: TabularLM) -> dict[str, Tensor]:
    """The gradients that losses in use have, by the names of `KNOWN`, shape [contexts, V] each.

    Args:
        policy: The policy p.
        reference: The reference q.
        behaviour: The policy that prefixes are samples from; if it is another one, the own-token gradients
            occur twice, with prefixes of the policy and, as "<name> (given prefixes)", with its own.
    """
    leaf = policy.logits.detach().double().requires_grad_()
    model = TabularLM(leaf, policy.max_length, policy.eos_token_id)
    tokens, mask = policy.sequences()
    log_p, log_q = (m.token_logits(tokens).log_softmax(-1) for m in (model, reference))
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    divergences = {
        "kl_own_token": log_p.exp() * (log_p - log_q),
        "reverse_own_token": log_q.exp() * (log_q - log_p),
        # Divided by w (1 - w) = 1/4, with which it is the KL where both are near
        "jsd_own_token": 2 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)),
        "chi2_own_token": ((2 * log_p - log_q).exp() - log_q.exp()) / 2,
    }

    def own_token(divergence: Tensor, prefixes: TabularLM) -> Tensor:
        per_token = torch.where(mask, divergence.sum(-1), 0)
        return _gradient(prefixes.logprobs(tokens, mask).exp().detach() @ per_token.sum(-1), leaf)

    own = {name: own_token(divergence, policy) for name, divergence in divergences.items()}
    whole = {
        "kl": exact_kl_gradient(policy, reference),
        "reverse": _gradient(exact_kl(reference, model), leaf),
    }
    gradients = {name: (whole | own)[name] for name in KNOWN}
    if behaviour is not policy:
        for name, divergence in divergences.items():
            gradients[f"{name} (given prefixes)"] = own_token(divergence, behaviour)
    return gradients


def _gradient(scalar: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(scalar, leaf, retain_graph=True)[0]
