"""Sums over the head in the tiled operations against `token_stats`, `kl_topk` and autograd."""

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TopK, clipped_loss, kl_topk, tiled_policy_loss, tiled_token_stats, token_stats
from lit_klrb.functional.tiled import blocks, inputs

VOCABULARY, SIZE = 23, 4
SHAPE = (3, 5)


def drawn(seed=0, dtype=torch.float64):
    """Hidden states, weights and biases of policy and reference, tokens, a mask and weights of a loss."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    policy = [normal(*SHAPE, SIZE), normal(VOCABULARY, SIZE), normal(VOCABULARY)]
    reference = [tensor + 0.5 * normal(*tensor.shape) for tensor in policy]
    tokens = torch.randint(VOCABULARY, SHAPE, generator=generator)
    mask = torch.rand(SHAPE, generator=generator) < 0.8
    return policy, reference, tokens, mask, [normal(*SHAPE) for _ in range(8)]


def plain(policy, reference, tokens, topk, temperature=1.0, softcap=None, token_values=None):
    def logits(hidden, weight, bias):
        values = hidden @ weight.T + bias
        return values if softcap is None else softcap * (values / softcap).tanh()

    return token_stats(logits(*policy), logits(*reference), tokens, temperature, token_values, topk)


def arguments(policy, reference, tokens):
    names = ("hidden", "weight", "bias", "ref_hidden", "ref_weight", "ref_bias")
    return {**dict(zip(names, (*policy, *reference), strict=True)), "tokens": tokens}


def leaves_of(tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def assert_same(got, expected, tolerance=1e-12):
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


HEADS = [TopK(1), TopK(5, "reference"), TopK(9), TopK(9, "reference"), TopK(VOCABULARY)]


# The statistics that a loss reads, and whether logits are retained for the backward pass or computed again:
# those of the entropy and, with a head, of the exact KL always are.
READ = [
    (("logprobs", "kl", "entropy", "expected_value", "head_kl", "head_mass"), True),
    (("logprobs", "expected_value", "head_kl", "head_mass"), True),
    (("logprobs", "expected_value", "head_kl", "head_mass"), False),
    (("head_kl",), True),
    (("logprobs",), True),
]


@pytest.mark.parametrize(("names", "retained"), READ)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("topk", HEADS, ids=str)
def test_statistics_and_their_gradients(topk, softcap, names, retained, monkeypatch):
    policy, reference, tokens, mask, factors = drawn()
    token_values = torch.linspace(-1, 2, VOCABULARY, dtype=torch.float64)
    if not retained:
        monkeypatch.setattr(inputs, "_RETAINED_LOGITS", 0)
    results = []
    for tiled in (False, True):
        leaves = leaves_of(policy)
        if tiled:
            stats = tiled_token_stats(
                **arguments(leaves, reference, tokens),
                topk=topk,
                token_values=token_values,
                tile_size=4,
                temperature=0.7,
                logit_softcap=softcap,
                ref_logit_softcap=softcap,
                mask=mask,
            )
        else:
            stats = plain(leaves, reference, tokens, topk, 0.7, softcap, token_values).masked(mask)
        read = [getattr(stats, name) for name in names]
        loss = sum((factor * field).sum() for factor, field in zip(factors, read, strict=False))
        results.append([*stats, *torch.autograd.grad(loss, leaves)])
    assert_same(results[1], results[0])
    assert not any(field[~mask].any() for field in stats if field is not None)


@pytest.mark.parametrize("clip_range", [None, 0.2])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("topk", HEADS, ids=str)
def test_the_loss_and_its_gradients(topk, softcap, clip_range):
    policy, reference, tokens, mask, (score, kl, value, behaviour, *_) = drawn(1)
    token_values = torch.linspace(-1, 2, VOCABULARY, dtype=torch.float64)
    leaves = leaves_of(policy)
    stats = plain(leaves, reference, tokens, topk, 0.7, softcap, token_values).masked(mask)
    behaviour = (stats.logprobs + 0.3 * behaviour).detach() if clip_range else None
    expected = ((kl * kl_topk(stats) + value * stats.expected_value) * mask).sum() / len(tokens)
    if behaviour is None:
        expected = expected + (score * stats.logprobs).sum() / len(tokens)
    else:
        log_ratio = torch.where(mask, stats.logprobs - behaviour, 0)
        expected = expected + clipped_loss(log_ratio, score * mask, clip_range)
    results = [[expected, stats.head_kl, stats.in_head, *torch.autograd.grad(expected, leaves)]]
    leaves = leaves_of(policy)
    loss, stats = tiled_policy_loss(
        **arguments(leaves, reference, tokens),
        mask=mask,
        score_weights=score,
        kl_weights=kl,
        value_weights=value,
        token_values=token_values,
        behaviour_logprobs=behaviour,
        clip_range=clip_range,
        topk=topk,
        tile_size=4,
        temperature=0.7,
        logit_softcap=softcap,
        ref_logit_softcap=softcap,
    )
    results.append([loss, stats.head_kl, stats.in_head, *torch.autograd.grad(loss, leaves)])
    assert_same(results[1], results[0])


def test_the_whole_vocabulary_is_the_exact_kl():
    policy, reference, tokens, mask, (score, kl, *_) = drawn(2)
    results = []
    for topk in (None, TopK(VOCABULARY)):
        leaves = leaves_of(policy)
        loss, stats = tiled_policy_loss(
            **arguments(leaves, reference, tokens), mask=mask, score_weights=score, kl_weights=kl, topk=topk
        )
        results.append([loss, stats.kl, *torch.autograd.grad(loss, leaves)])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_that_of_float32(dtype):
    policy, reference, tokens, mask, (score, kl, *_) = drawn(3, dtype)
    results = []
    for precision in (torch.float64, dtype):
        leaves = leaves_of(tensor.to(precision) for tensor in policy)
        others = [tensor.to(precision) for tensor in reference]
        loss, stats = tiled_policy_loss(
            **arguments(leaves, others, tokens), mask=mask, score_weights=score, kl_weights=kl, topk=TopK(9)
        )
        found = [loss, stats.head_kl, *torch.autograd.grad(loss, leaves)]
        results.append([tensor.double() for tensor in found])
    assert_same(results[1], results[0], 1e-5 if dtype == torch.float32 else 2e-2)


def test_a_token_that_only_the_reference_excludes_needs_a_weight_of_zero():
    policy, reference, tokens, mask, (score, *_) = drawn(4)
    reference[2][-2] = -torch.inf  # in the last block
    leaves, zeros = leaves_of(policy), torch.zeros_like(score)
    with pytest.warns(UserWarning, match="gives probability to token 21, the reference none"):
        loss, stats = tiled_policy_loss(
            **arguments(leaves, reference, tokens),
            mask=mask,
            score_weights=score,
            kl_weights=zeros,
            topk=TopK(VOCABULARY),
        )
    assert (stats.head_kl[mask] == torch.inf).all()
    assert all(gradient.isfinite().all() for gradient in (loss, *torch.autograd.grad(loss, leaves)))


def test_a_row_of_the_reference_is_never_retained(monkeypatch):
    policy, reference, tokens, mask, (score, kl, *_) = drawn(5)
    sizes = []
    for topk in (None, TopK(3)):
        workspace = blocks._Workspace()
        monkeypatch.setattr(blocks, "_WORKSPACE", workspace)
        tiled_policy_loss(
            **arguments(leaves_of(policy), reference, tokens),
            mask=mask,
            score_weights=score,
            kl_weights=kl,
            topk=topk,
            tile_size=4,
        )
        sizes.append({name: len(memory) for (name, _), memory in workspace._buffers.items()})
    assert sizes[0] == {"logits": 4 * 7, "ref_logits": 4 * VOCABULARY, "masses": 4 * VOCABULARY}
    assert sizes[1] == {"logits": 4 * 7, "ref_logits": 4 * 7, "masses": 4 * VOCABULARY}


def test_k_beyond_the_vocabulary_is_refused():
    policy, reference, tokens, *_ = drawn()
    with pytest.raises(ConfigurationError, match="k: must be between 1 and V = 23, got 24"):
        tiled_token_stats(**arguments(policy, reference, tokens), topk=TopK(24))
