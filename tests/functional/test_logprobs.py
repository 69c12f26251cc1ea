"""Token statistics; `test_any_input` compares them with float64."""

import math
import warnings

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, ReleasedRaoBlackwell
from lit_klrb.functional import token_stats


def random(*shape, seed=0, spread=2.0, dtype=torch.float32):
    return (spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def test_a_table_of_token_values_may_be_shorter_than_the_vocabulary():
    logits, tokens, values = random(2, 3, 7), torch.full((2, 3), 5), random(7, seed=4)
    short = token_stats(logits, -logits, tokens, token_values=values[:4])
    padded = token_stats(logits, -logits, tokens, token_values=torch.cat([values[:4], torch.zeros(3)]))
    assert torch.equal(short.value, torch.zeros(2, 3))
    assert torch.equal(short.expected_value, padded.expected_value)
    for wrong in (torch.cat([values, values[:1]]), values[None]):
        with pytest.raises(ConfigurationError, match=r"token_values: must have shape \[7\] or be shorter"):
            token_stats(logits, -logits, tokens, token_values=wrong)


def test_half_precision_logits_are_read_in_float32_and_no_kl_is_negative():
    logits = random(4, 16, 500, dtype=torch.bfloat16)
    ref_logits = (logits.float() + random(4, 16, 500, seed=1, spread=1e-3)).to(torch.bfloat16)
    tokens = torch.zeros(4, 16, dtype=torch.long)
    stats = token_stats(logits, ref_logits, tokens)
    assert all(field.dtype == torch.float32 for field in stats[:4])
    assert (stats.kl >= 0).all()
    p, q = (values.double().log_softmax(-1) for values in (logits, ref_logits))
    torch.testing.assert_close(stats.kl.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-3, atol=1e-9)
    naive = (logits.softmax(-1) * (logits.log_softmax(-1) - ref_logits.log_softmax(-1))).sum(-1)
    assert (naive < 0).any()


def test_mass_where_the_reference_has_none_is_infinite_and_named_once():
    ref_logits = torch.zeros(1, 3, 5)
    ref_logits[..., 3] = -torch.inf
    with pytest.warns(UserWarning, match="gives probability to token 3, the reference none") as shown:
        stats = token_stats(torch.zeros(1, 3, 5), ref_logits, torch.zeros(1, 3, dtype=torch.long))
    assert len(shown) == 1
    assert stats.kl.tolist() == [[math.inf] * 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reverse = token_stats(ref_logits, torch.zeros(1, 3, 5), torch.zeros(1, 3, dtype=torch.long))
    assert torch.allclose(reverse.kl, torch.full((1, 3), math.log(5 / 4)))


@pytest.mark.parametrize(
    "estimator",
    [
        MonteCarlo(),
        RaoBlackwell(),
        RaoBlackwell(off_policy="prefix"),
        ReleasedRaoBlackwell(off_policy="clip"),
    ],
)
def test_completions_of_one_token_and_of_none(estimator):
    leaf = random(4, 3, 6).requires_grad_()
    stats = token_stats(leaf, random(4, 3, 6, seed=1), torch.zeros(4, 3, dtype=torch.long))
    mask = torch.tensor([[True, False, False], [False] * 3, [True, True, True], [False] * 3])
    loss = estimator.objective(
        stats, mask, torch.arange(4.0), beta=0.3, group_size=2, behaviour_logprobs=stats.logprobs.detach()
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()
    assert gradient[mask].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: must be positive and finite, got 0.0"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.long)}, "must have shapes"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {
        "logits": torch.zeros(1, 2, 3),
        "ref_logits": torch.zeros(1, 2, 3),
        "tokens": torch.zeros(1, 2, dtype=torch.long),
    }
    with pytest.raises(ConfigurationError, match=message):
        token_stats(**arguments | change)
