"""Two models of one tokenizer whose embeddings are padded to different sizes, as those of Qwen2.5 are."""

import copy

import pytest
import torch

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwell
from lit_klrb.models.generation import Sampling
from lit_klrb.models.roles import model_from_config
from lit_klrb.rollouts.pair import Loaded, Pair
from lit_klrb.rollouts.step import policy_loss

COMMON, PADDING = 365, 64
CONFIG = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 32, "tie_word_embeddings": False}


def loaded(key, rows, seed, tokenizer=None):
    torch.manual_seed(seed)
    model = model_from_config({"model_type": "gpt2", "vocab_size": rows, **CONFIG}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        if rows > COMMON:  # a third of the mass is on the padding
            model.lm_head.weight[COMMON:] *= 2
    return Loaded(key, f"{rows} rows", model, tokenizer or grammar_tokenizer())


@pytest.fixture(params=[(COMMON + PADDING, COMMON), (COMMON, COMMON + PADDING)])
def pair(request):
    policy, reference = request.param
    return Pair(loaded("policy_path", policy, 0), loaded("reference_path", reference, 1))


def prompts():
    tokens = torch.arange(1, 17).view(4, 4)
    return {"tokens": tokens, "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}


def plain(model, rollout):
    """Log-probabilities over the common rows, [B, T, V]."""
    logits = model(rollout.tokens, attention_mask=rollout.attention_mask.long()).logits
    return logits[:, -rollout.mask.shape[1] - 1 : -1, :COMMON].log_softmax(-1)


@pytest.mark.parametrize("tiled", [True, False])
def test_rows_that_one_lacks_are_left_out_of_both_distributions(pair, tiled):
    assert f"{PADDING} rows of" in pair.note
    assert pair.vocabulary_size == COMMON
    if not tiled:
        pair.scorer._parts = (None, None)
    rollout = pair.sample(prompts(), Sampling(50, 6), seed=0)
    assert int(rollout.completions.max()) < COMMON
    states, stats = pair.score(rollout, prompts())
    own, theirs = (plain(model, rollout) for model in (pair.policy, pair.reference))
    kl = torch.where(rollout.mask, (own.exp() * (own - theirs)).sum(-1), 0)
    chosen = torch.where(rollout.mask, own.gather(-1, rollout.completions[..., None])[..., 0], 0)
    found = stats.masked(rollout.mask)
    assert (found.kl - kl).abs().max() < 1e-12
    assert (found.logprobs - chosen).abs().max() < 1e-12
    assert (pair.scorer.logprobs(rollout) - chosen).abs().max() < 1e-12

    rewards = torch.rand(len(rollout.mask), dtype=torch.float64)
    weights = RaoBlackwell().weights(stats.detach(), rollout.mask, rewards, beta=0.3, group_size=50)
    loss = policy_loss(
        pair.scorer, RaoBlackwell(), rollout, states, weights, beta=0.3, behaviour_logprobs=chosen.detach()
    )
    expected = ((weights.score * chosen).sum() + (weights.kl * kl).sum()) / len(rewards)
    parameters = list(pair.policy.parameters())
    ours, truth = (
        torch.autograd.grad(value, parameters, materialize_grads=True) for value in (loss, expected)
    )
    assert max((a - b).abs().max().item() for a, b in zip(ours, truth, strict=True)) < 1e-12
    assert any(gradient.abs().max() > 1e-3 for gradient in truth)


def test_a_token_without_a_row_in_the_other_is_refused():
    words = grammar_tokenizer()
    longer = copy.deepcopy(words)
    longer.add_tokens([f"<{number}>" for number in range(len(words), COMMON + 1)])
    policy = loaded("policy_path", COMMON + PADDING, 0, longer)
    with pytest.raises(
        ConfigurationError, match=r"reference_path: .* id 365 is no token there and '<365>' in the policy"
    ):
        Pair(policy, loaded("reference_path", COMMON, 1, words))
