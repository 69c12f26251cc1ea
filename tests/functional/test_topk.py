"""Top-k estimates of a token's KL against the exact KL, by enumeration of the sampled token."""

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwellTopK
from lit_klrb.estimators.recipe import per_token
from lit_klrb.functional import TopK, kl_topk, token_stats
from replication.topk_rivals import RIVALS

ESTIMATES = {kind.__name__: per_token(kind.recipe.value).of for kind in (RaoBlackwellTopK, *RIVALS)}
UNBIASED = {"RaoBlackwellTopK", "TopKWeightedTail", "TopKBaseline"}
VOCABULARY = 40


def models(seed=0, distance=0.7, vocabulary=VOCABULARY):
    """Logits of a policy and a reference over a vocabulary with Zipf's frequencies, float64."""
    generator = torch.Generator().manual_seed(seed)
    zipf = -torch.arange(1.0, vocabulary + 1, dtype=torch.float64).log()
    noise = torch.randn(2, vocabulary, dtype=torch.float64, generator=generator)
    return (zipf + 0.3 * noise[0]).requires_grad_(), zipf + 0.3 * noise[0] + distance * noise[1]


def enumerated(estimate, logits, ref_logits, k, support):
    """Mean value, mean gradient, smallest value, and the gradient's total variance over sampled tokens."""
    tokens = torch.arange(len(logits))[:, None]
    rows = logits.expand(len(logits), 1, -1), ref_logits.expand(len(logits), 1, -1)
    values = estimate(token_stats(*rows, tokens, topk=TopK(k, support)))[:, 0]
    gradients = torch.stack([torch.autograd.grad(v, logits, retain_graph=True)[0] for v in values])
    p = logits.detach().softmax(0)
    mean = p @ gradients
    variance = p @ (gradients - mean).square().sum(1)
    return p @ values.detach(), mean, values.min().item(), variance.item()


def exact(logits, ref_logits):
    p, q = logits.log_softmax(0), ref_logits.log_softmax(0)
    kl = (p.exp() * (p - q)).sum()
    (gradient,) = torch.autograd.grad(kl, logits)
    return kl.detach(), gradient


def test_the_head_is_that_of_the_model_that_is_named():
    logits, ref_logits = models(distance=2.0)
    rows = logits[None, None], ref_logits[None, None], torch.zeros(1, 1, dtype=torch.long)
    p, q = logits.softmax(0), ref_logits.softmax(0)
    for support, own in (("policy", p), ("reference", q)):
        stats, head = token_stats(*rows, topk=TopK(5, support)), own.topk(5).indices
        torch.testing.assert_close(stats.head_mass.flatten(), p[head].sum()[None])
        torch.testing.assert_close(stats.ref_head_mass.flatten(), q[head].sum()[None])
        excess = (p * (p.log() - q.log()) - p + q)[head].sum()
        torch.testing.assert_close(stats.head_kl.flatten(), excess[None])
        assert stats.in_head.item() == (0 in head)


def test_tokens_that_a_model_excludes_are_counted_as_in_the_exact_kl():
    """A head with tokens of probability 0 under the policy, and one that only the reference excludes."""
    absent, tokens = -torch.inf, torch.tensor([[0]])
    logits = torch.tensor([[[0.0, 1.0, absent, absent]]], requires_grad=True)
    ref_logits = torch.tensor([[[0.5, 0.0, 1.0, absent]]])
    stats = token_stats(logits, ref_logits, tokens, topk=TopK(4))
    torch.testing.assert_close(kl_topk(stats), stats.kl)
    kl_topk(stats).sum().backward()
    assert logits.grad.isfinite().all()
    with pytest.warns(UserWarning, match="gives probability to token 2, the reference none"):
        stats = token_stats(ref_logits, logits.detach(), torch.tensor([[2]]), topk=TopK(1, "reference"))
    assert stats.in_head.item() == 0
    assert kl_topk(stats).item() == torch.inf


def test_what_is_out_of_range_is_refused():
    logits, tokens = torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ConfigurationError, match="k: must be between 1 and V = 3, got 4"):
        token_stats(logits, logits, tokens, topk=TopK(4))
    with pytest.raises(ConfigurationError, match="support: must be policy or reference, got 'teacher'"):
        token_stats(logits, logits, tokens, topk=TopK(1, "teacher"))


@pytest.mark.parametrize("name", sorted({*ESTIMATES} - {"RaoBlackwellTopK"}))
def test_without_a_head_only_the_exact_kl_is_left(name):
    logits = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    stats = token_stats(logits, -logits, torch.zeros(1, 2, dtype=torch.long))
    torch.testing.assert_close(kl_topk(stats), stats.kl)
    with pytest.raises(ConfigurationError, match=r"stats.head_kl is None; .* needs statistics with topk"):
        ESTIMATES[name](stats)
