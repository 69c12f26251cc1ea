"""The head of top-k estimates of a token's KL."""

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwellTopK
from lit_klrb.estimators.recipe import per_token
from lit_klrb.functional import TopK, kl_topk, token_stats
from replication.topk_rivals import RIVALS

ESTIMATES = {kind.__name__: per_token(kind.recipe.value).of for kind in (RaoBlackwellTopK, *RIVALS)}


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
