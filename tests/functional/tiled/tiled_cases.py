"""Cases of the tiled operations, and their definition in terms of full logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.functional import TokenStats, tiled_policy_loss, tiled_token_stats, token_stats


class Case(NamedTuple):
    """Arguments of the tiled operations; the first three take gradients."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    ref_bias: Tensor
    tokens: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(tensor.detach().requires_grad_() for tensor in self[:3])


def make_case(batch=3, length=5, size=4, vocabulary=23, dtype=torch.float64, seed=0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, spread=1.0):
        return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    hidden, weight = normal(batch, length, size), normal(vocabulary, size)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator)
    return Case(
        hidden,
        weight,
        normal(vocabulary),
        hidden + normal(batch, length, size, spread=0.3),
        weight + normal(vocabulary, size, spread=0.3),
        normal(vocabulary),
        tokens,
    )


def weights_like(tokens: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens.shape, generator=generator, dtype=torch.float64)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def plain_stats(
    case: Case,
    leaves,
    temperature=1.0,
    softcap=None,
    ref_softcap=None,
    token_values=None,
    topk=None,
    jsd_weight=None,
) -> TokenStats:
    """The definition: full logits, `token_stats`, autograd."""
    hidden, weight, bias = leaves
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    ref_logits = case.ref_hidden @ case.ref_weight.T + (0 if case.ref_bias is None else case.ref_bias)
    both = capped(logits, softcap), capped(ref_logits, ref_softcap)
    return token_stats(*both, case.tokens, temperature, token_values, topk, jsd_weight)


def tiled_stats(case: Case, leaves, **options) -> TokenStats:
    hidden, weight, bias = leaves
    return tiled_token_stats(
        hidden,
        weight,
        case.ref_hidden,
        case.ref_weight,
        case.tokens,
        bias=bias,
        ref_bias=case.ref_bias,
        **options,
    )


def tiled_loss(case: Case, leaves, mask, score_weights, kl_weights, **options):
    hidden, weight, bias = leaves
    return tiled_policy_loss(
        hidden,
        weight,
        case.ref_hidden,
        case.ref_weight,
        case.tokens,
        mask,
        score_weights,
        kl_weights,
        bias=bias,
        ref_bias=case.ref_bias,
        **options,
    )


def present(stats: TokenStats) -> list[Tensor]:
    return [field for field in stats if field is not None]


def token_values(case: Case) -> Tensor:
    return torch.linspace(-1, 2, len(case.weight), dtype=case.weight.dtype).square()


def gradients(loss: Tensor, leaves) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


def assert_close(got, expected, tolerance=1e-12) -> None:
    got, expected = present(got), present(expected)
    assert len(got) == len(expected)
    for left, right in zip(got, expected, strict=True):
        assert left.shape == right.shape
        torch.testing.assert_close(left.double(), right.double(), rtol=tolerance, atol=tolerance)


def in_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
