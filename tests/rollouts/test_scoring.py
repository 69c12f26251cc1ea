"""Scoring by hidden states and heads equals scoring by logits."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lit_klrb.estimators import LossWeights
from lit_klrb.functional import TopK, kl_topk, token_stats
from lit_klrb.functional.tiled import logprobs
from lit_klrb.models import heads
from lit_klrb.models.heads import split_model
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.scoring import Scorer, completion_logits, completion_logprobs

SMALL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
ARCHITECTURES = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gpt_neox": {**LLAMA, "rotary_pct": 0.5},
    "gemma2": {
        **LLAMA,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
        "sliding_window": 3,
    },
}
UNSPLIT = {"granite": {**LLAMA, "logits_scaling": 3.0}}


def make(kind, seed):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **SMALL, **{**ARCHITECTURES, **UNSPLIT}[kind])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def rollout():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 50, (4, 9), generator=generator)
    tokens[[1, 3], :4] = tokens[0, :4]  # rows 0 and 3 have the same prompt, row 1 a shorter one
    attention = torch.ones(4, 9, dtype=torch.bool)
    attention[1, :2] = False
    attention[2, 7:] = False
    return Rollout(tokens, attention, attention[:, 4:])


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *UNSPLIT])
def test_statistics_and_gradients_equal_those_of_the_logits(kind, rollout):
    policy, reference = make(kind, 0), make(kind, 1)
    scorer = Scorer(policy, reference, temperature=0.7)
    assert scorer.tiled == (kind not in UNSPLIT)
    states = scorer.reference_states(rollout)
    assert not states.requires_grad
    assert states.shape == (4, 5, 16 if scorer.tiled else 50)
    results = []
    for stats in (
        scorer.stats(rollout, states),
        token_stats(
            completion_logits(policy, rollout),
            completion_logits(reference, rollout).detach(),
            rollout.completions,
            0.7,
        ),
    ):
        policy.zero_grad()
        masked = stats.masked(rollout.mask)
        (masked.kl.sum() + 0.3 * masked.logprobs.sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        results.append((masked, gradient))
    (ours, gradient), (plain, expected) = results
    for name in ("logprobs", "ref_logprobs", "kl", "entropy"):
        assert torch.allclose(getattr(ours, name), getattr(plain, name), atol=1e-4), name
    assert torch.allclose(gradient, expected, atol=1e-3 * expected.abs().max().item())
    assert ours.kl.max() > 0.1


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *UNSPLIT])
def test_log_probabilities_alone_equal_those_of_the_logits(kind, rollout, monkeypatch):
    """For the completions of pairs (DPO), and for complete texts (SFT)."""
    monkeypatch.setattr(logprobs, "_AT_ONCE", 0)
    policy = make(kind, 0)
    scorer = Scorer(policy, make(kind, 1), temperature=0.7)
    texts = rollout._replace(mask=rollout.attention_mask[:, 1:])
    parameters = [p for p in policy.parameters() if p.requires_grad]
    weights = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for part, ours in (
        (rollout, scorer.logprobs(rollout)),
        (texts, completion_logprobs(policy, texts, 0.7, split_model(policy))),
    ):
        logits = completion_logits(policy, part) / 0.7
        plain = logits.log_softmax(-1).gather(-1, part.completions[..., None])[..., 0] * part.mask
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-4)
        gradients = [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
            for loss in ((weights[:, -ours.shape[1] :] * values).sum() for values in (ours, plain))
        ]
        assert torch.allclose(*gradients, atol=1e-4 * gradients[1].abs().max().item())
    reference = scorer.reference_logprobs(rollout)
    assert not reference.requires_grad
    torch.testing.assert_close(
        reference, completion_logprobs(scorer.reference, rollout, 0.7), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_equal_prompts_are_processed_once(rollout, checkpointing):
    model, processed = make("gpt2", 0), []
    split = split_model(model)
    if checkpointing:
        # The second name before transformers 5.21
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: processed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    split.hidden_states(rollout)
    assert processed == ([4 * 8] if checkpointing else [3 * 3, 4 * 5])
    processed.clear()
    split.hidden_states(rollout.rows(slice(0, 3)))  # all prompts differ
    assert processed == [3 * 8]


@pytest.mark.parametrize(("valued", "topk"), [(False, None), (True, None), (False, TopK(3))])
@pytest.mark.parametrize("clip_range", [None, 0.2, (0.1, 0.3)])
def test_the_loss_with_known_weights_is_that_of_the_statistics(rollout, clip_range, valued, topk):
    policy = make("gpt2", 0)
    scorer = Scorer(policy, make("gpt2", 1), temperature=1.0)
    states = scorer.reference_states(rollout)
    generator = torch.Generator().manual_seed(1)
    score, kl, noise = (torch.randn(4, 5, generator=generator) for _ in range(3))
    weights = LossWeights(score * rollout.mask, kl * rollout.mask, score * kl if valued else None)
    values = torch.linspace(-1, 1, 50) if valued else None
    stats = scorer.stats(rollout, states, values, topk)
    behaviour = (stats.logprobs + 0.3 * noise).detach()
    masked = stats.masked(rollout.mask)
    if clip_range is None:
        score_part = weights.score * masked.logprobs
    else:
        below, above = (0.2, 0.2) if clip_range == 0.2 else clip_range
        ratio = torch.where(rollout.mask, masked.logprobs - behaviour, 0).exp()
        score_part = torch.maximum(weights.score * ratio, weights.score * ratio.clamp(1 - below, 1 + above))
    expected = (score_part + weights.kl * kl_topk(masked)).sum() / 4
    if valued:
        expected = expected + (weights.value * masked.expected_value).sum() / 4
    loss = scorer.loss(rollout, states, weights, behaviour, clip_range, values, topk)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    ours, plain = (torch.autograd.grad(value, parameters, allow_unused=True) for value in (loss, expected))
    for one, other in zip(ours, plain, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-4, rtol=1e-2)


def test_a_policy_that_cannot_be_split_is_read_through_logits_with_any_reference(rollout):
    assert split_model(make("granite", 0)) is None
    scorer = Scorer(make("gpt2", 0), make("granite", 1), temperature=1.0)
    assert not scorer.tiled
    stats = scorer.stats(rollout, scorer.reference_states(rollout))
    plain = completion_logprobs(scorer.policy, rollout, 1.0)
    assert torch.allclose(stats.masked(rollout.mask).logprobs, plain, atol=1e-5)


def test_a_head_with_something_on_it_is_not_split():
    model = make("gpt2", 0)

    class Adapted(torch.nn.Linear):
        pass

    adapted = Adapted(16, 50, bias=False)
    adapted.weight = model.lm_head.weight
    model.set_output_embeddings(adapted)
    assert split_model(model) is None


def test_rows_of_similar_length_are_read_together_after_prompts_that_are_read_once(monkeypatch):
    model = (
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", **SMALL, n_layer=2, n_embd=16, n_head=2, n_positions=32)
        )
        .double()
        .eval()
    )
    lengths = torch.tensor([12, 1, 2, 7, 3, 3, 1, 2] * 4)
    mask = torch.arange(12) < lengths[:, None]
    tokens = torch.randint(50, (32, 15), generator=torch.Generator().manual_seed(0))
    tokens[:, :3] = tokens[:8, :3].repeat(4, 1)
    rollout = Rollout(tokens, torch.cat([torch.ones(32, 3, dtype=torch.bool), mask], 1), mask)
    split = split_model(model)
    found, read = [], []
    split.backbone.register_forward_hook(lambda model, inputs, states: read.append(states[0].shape[:2]))
    # 7,000 weights spare too little by any further part
    split.hidden_states(rollout)
    assert read == [(8, 2), (32, 12)]
    read.clear()
    split.hidden_states(rollout, worth=(49 * split.weights, 1e12))  # prompts spare 2 · 24 tokens
    assert read == [(32, 14)]
    read.clear()
    monkeypatch.setitem(heads.WORTH, "cpu", (0, 1e5))
    for most in (1, heads.MOST):
        monkeypatch.setattr(heads, "MOST", most)
        parts = heads.by_length(rollout, most, 1e5 / split.weights)
        assert len(parts) == most
        assert sorted(torch.cat([rows for rows, _ in parts]).tolist()) == [*range(32)]
        assert all(length == lengths[rows].max() or most == 1 for rows, length in parts)
        states = split.hidden_states(rollout)[mask]
        assert read == [(8, 2), *((len(rows), length) for rows, length in parts)]
        read.clear()
        model.zero_grad()
        states.square().sum().backward()
        found.append((states.detach(), *(weight.grad.clone() for weight in split.backbone.parameters())))
    for plain, parted in zip(*found, strict=True):
        torch.testing.assert_close(parted, plain, rtol=1e-10, atol=1e-10)


def test_the_trial_of_a_split_reads_equal_prompts_once_where_nothing_else_does(monkeypatch):
    monkeypatch.setitem(heads.WORTH, "cpu", (1e12, 1e12))
    model, read = make("gpt2", 0), []
    model.base_model.register_forward_hook(lambda model, inputs, states: read.append(len(states[0])))
    assert split_model(model).caches
    assert 1 in read


def test_states_that_are_added_up_in_float32_are_rounded_before_a_head_of_16_bits():
    config = AutoConfig.for_model("mamba", vocab_size=17, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    everything = torch.ones(1, 4, dtype=torch.bool)
    rollout = Rollout(torch.arange(4)[None], everything, everything[:, -2:])
    split = split_model(model)
    with torch.no_grad():
        assert torch.equal(split.head(split.hidden_states(rollout)), completion_logits(model, rollout))
