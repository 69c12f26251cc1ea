"""Top-k estimates in expectation, over every token that can be sampled."""

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.top_k import TOP_K_ESTIMATES, head_of

V, K = 12, 4
UNBIASED_GRADIENT = ("one_plus_ratio_tail", "score", "unbiased")
UNBIASED_VALUE = ("ratio_tail", *UNBIASED_GRADIENT)
NEVER_NEGATIVE = ("renormalised", "tail_bucket", "generalised", "unbiased")


def models(seed, distance=1.0):
    """Logits of a policy and a reference, with the policy's likeliest tokens as the head."""
    generator = torch.Generator().manual_seed(seed)
    policy, step = torch.randn(2, V, dtype=torch.float64, generator=generator)
    return policy, policy + distance * step, policy.topk(K).indices


def every_token(name, policy, reference, head):
    """The estimate for each token that can be sampled, [V]; the policy's logits are a leaf."""
    kept = head_of(policy.expand(V, V), reference.expand(V, V), torch.arange(V), head.expand(V, -1))
    return TOP_K_ESTIMATES[name](kept)


def exact_kl(policy, reference):
    logprobs = policy.log_softmax(-1)
    return (logprobs.exp() * (logprobs - reference.log_softmax(-1))).sum()


def means(name, seed, distance=1.0):
    """Expectations of value and gradient, the exact ones, and the gradient of the head's mass."""
    policy, reference, head = models(seed, distance)
    leaf = policy.requires_grad_()
    probabilities = leaf.softmax(-1)
    estimate = every_token(name, leaf, reference, head)
    chance = probabilities.detach()
    (gradient,) = torch.autograd.grad(chance @ estimate.loss, leaf, retain_graph=True)
    exact = exact_kl(leaf, reference)
    (true,) = torch.autograd.grad(exact, leaf)
    (mass,) = torch.autograd.grad(probabilities[head].sum(), leaf)
    return chance @ estimate.value, gradient, exact.detach(), true, mass


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", TOP_K_ESTIMATES)
def test_expectations(name, seed):
    value, gradient, exact, true, mass = means(name, seed)
    assert ((value - exact).abs() < 1e-12) == (name in UNBIASED_VALUE)
    assert ((gradient - true).norm() < 1e-12) == (name in UNBIASED_GRADIENT)
    if name == "ratio_tail":  # claimed to be unbiased
        torch.testing.assert_close(gradient - true, mass, rtol=0, atol=1e-12)
    if name in ("tail_bucket", "generalised"):
        assert value < exact


@pytest.mark.parametrize("name", TOP_K_ESTIMATES)
def test_which_values_can_be_negative(name):
    lowest = min(every_token(name, *models(seed, 2.0)).value.min().item() for seed in range(50))
    assert (lowest >= -1e-12) == (name in NEVER_NEGATIVE)


def test_ours_has_the_least_variance_of_the_unbiased_ones():
    def variance(name, seed):
        policy, reference, head = models(seed, 0.3)
        leaf = policy.requires_grad_()
        loss = every_token(name, leaf, reference, head).loss
        gradients = torch.stack([torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in loss])
        chance = leaf.softmax(-1).detach()
        return (chance @ (gradients - chance @ gradients).square().sum(1)).item()

    totals = {name: sum(variance(name, seed) for seed in range(10)) for name in UNBIASED_GRADIENT}
    assert totals["unbiased"] < 0.6 * totals["score"]
    assert totals["unbiased"] < 0.6 * totals["one_plus_ratio_tail"]


def test_the_whole_vocabulary_as_the_head_is_the_exact_kl():
    policy, reference, _ = models(0)
    for name in ("truncated", "renormalised", "generalised", "unbiased"):
        value = every_token(name, policy, reference, torch.arange(V)).value
        torch.testing.assert_close(value, exact_kl(policy, reference).expand(V))


def test_shapes_are_checked():
    with pytest.raises(ConfigurationError, match=r"have shapes \[\[2, 5\], \[2, 5\], \[3\], \[2, 1\]\]"):
        head_of(*torch.zeros(2, 2, 5), torch.zeros(3).long(), torch.zeros(2, 1).long())
