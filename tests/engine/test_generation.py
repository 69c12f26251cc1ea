import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel

from lit_klrb.engine.generation import Sampling, generate_completions, inverse_transform
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.rollout import completion_mask
from lit_klrb.rollouts.scoring import completion_logits

EOS = 0


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=6, n_embd=8, n_layer=1, n_head=1, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(30)
    return model


def sample(model, prompts, mask, count, *, length=4, temperature=1.0, seed=0, eos=(EOS,)):
    sampling = Sampling(count, length, temperature)
    return generate_completions(model, prompts, mask, sampling, seed=seed, ends=eos, pad_token_id=EOS)


PROMPTS = torch.tensor([[3, 1, 4], [0, 0, 5]])
MASK = torch.tensor([[True, True, True], [False, False, True]])


def test_completions_of_a_prompt_are_adjacent_rows(model):
    rollout = sample(model, PROMPTS, MASK, 3)
    assert torch.equal(rollout.tokens[:, :3], PROMPTS.repeat_interleave(3, 0))
    assert torch.equal(rollout.attention_mask[:, :3], MASK.repeat_interleave(3, 0))
    assert torch.equal(rollout.attention_mask[:, 3:], rollout.mask)


def test_the_mask_ends_with_the_first_eos(model):
    rollout = sample(model, PROMPTS, MASK, 50)
    for completion, mask in zip(rollout.completions.tolist(), rollout.mask.tolist(), strict=True):
        length = completion.index(EOS) + 1 if EOS in completion else len(completion)
        assert mask == [t < length for t in range(len(completion))]
    assert sample(model, PROMPTS, MASK, 50, eos=()).mask.all()
    assert completion_mask(torch.tensor([[1, 0, 2, 0]]), [0]).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_first_tokens_follow_the_models_distribution_at_the_temperature(model, temperature):
    draws = 4000
    rollout = sample(model, PROMPTS, MASK, draws, length=1, temperature=temperature)
    for prompt, mask, tokens in zip(PROMPTS, MASK, rollout.completions.view(2, draws), strict=True):
        with torch.no_grad():
            logits = model(prompt[mask][None]).logits[0, -1]
        expected = (logits / temperature).softmax(-1) * draws
        observed = torch.bincount(tokens, minlength=6)
        kept = expected > 5
        scale = observed[kept].sum() / expected[kept].sum()
        assert (
            chisquare(observed[kept].numpy(), (expected[kept] * scale).numpy(), sum_check=False).pvalue > 1e-3
        )


def test_a_batch_cut_into_parts_gives_the_same_tokens(model):
    whole = sample(model, PROMPTS, MASK, 3, eos=()).tokens
    sampling = Sampling(3, 4, 1.0)
    second = generate_completions(
        model, PROMPTS[1:], MASK[1:], sampling, seed=0, ends=(), pad_token_id=EOS, rows_before=3
    )
    assert torch.equal(second.tokens, whole[3:])
    assert not torch.equal(sample(model, PROMPTS[1:], MASK[1:], 3, eos=()).tokens, whole[3:])


def test_a_token_without_probability_is_never_drawn():
    uniforms = torch.tensor([0.0, 0.49, 0.51, 1 - 2**-53], dtype=torch.float64)
    for width in (5, 64, 200):
        probabilities = torch.zeros(4, width)
        first, last = width // 3, width - 2
        probabilities[:, [first, last]] = 0.3
        assert inverse_transform(probabilities, uniforms).tolist() == [first, first, last, last]
    rare = torch.zeros(50, 128)
    rare[:, 0], rare[:, 100] = 1, torch.logspace(-17, -12, 50)  # lost, or not, in the cumulative sum
    for uniform in (1 - 2**-53, 1 - 2**-50, 1 - 2**-45):
        drawn = inverse_transform(rare, torch.full((50,), uniform, dtype=torch.float64))
        assert set(drawn.tolist()) <= {0, 100}


@pytest.mark.parametrize("vocabulary", [7, 64, 1000])
def test_tokens_are_the_inverse_distribution_function(vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, vocabulary, generator=generator)
    logits[:, ::5] = -torch.inf
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = (cumulative <= uniforms[:, None]).sum(1)
    assert torch.equal(inverse_transform(logits.softmax(-1), uniforms), expected)


LLAMA = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8},
}
ARCHITECTURES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": LLAMA,
    "gemma2": {**LLAMA, "sliding_window": 4, "query_pre_attn_scalar": 8},
    # Sampled from whole sequences, as its states are not in a cache of keys and values
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_tokens_sampled_from_cached_states_are_those_of_whole_sequences(kind):
    torch.manual_seed(0)
    special = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **special, **ARCHITECTURES[kind]))
    policy.eval().get_output_embeddings().weight.detach().mul_(8)
    prompts = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(6) >= torch.tensor([[0], [2], [5]])
    rollout = sample(policy, prompts, mask, 4, length=12, temperature=0.8, seed=3)
    uniforms = torch.rand(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    probabilities = (completion_logits(policy, rollout) / 0.8).softmax(-1)
    sampled = inverse_transform(probabilities.flatten(0, 1), uniforms[:, : rollout.mask.shape[1]].flatten())
    expected = sampled.view_as(rollout.mask)
    assert torch.equal(rollout.completions[rollout.mask], expected[rollout.mask])
    assert len(rollout.completions.unique()) > 10


def test_the_seed_decides_and_the_surrounding_randomness_is_left_alone(model):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    model.train()
    one, same, other = (sample(model, PROMPTS, MASK, 20, seed=seed).tokens for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    model.eval()
    assert torch.equal(one, same)
    assert one.shape != other.shape or not torch.equal(one, other)


def test_what_a_models_generation_settings_ask_for_is_left_out(model):
    plain = sample(model, PROMPTS, MASK, 20, seed=1).tokens
    own = model.generation_config
    model.generation_config = GenerationConfig(
        repetition_penalty=5.0, bad_words_ids=[[1]], min_p=0.3, top_k=2, eos_token_id=3, max_length=5
    )
    try:
        asked = model.generation_config
        assert torch.equal(sample(model, PROMPTS, MASK, 20, seed=1).tokens, plain)
        assert model.generation_config is asked
        unlimited = sample(model, PROMPTS, MASK, 50, length=20, eos=())
        assert unlimited.mask.all()
        assert unlimited.mask.shape[1] == 20
        # No token ends a completion, so tokens after one are sampled, not padding.
        assert (unlimited.completions[:, 1:][unlimited.completions[:, :-1] == EOS] != EOS).any()
    finally:
        model.generation_config = own


def test_completions_that_reach_over_the_models_positions_are_refused(model):
    with pytest.raises(
        ConfigurationError, match="30 after a prompt of 3 tokens exceeds the policy's context length, 32"
    ):
        sample(model, PROMPTS, MASK, 2, length=30)
    sample(model, PROMPTS, MASK, 2, length=29)


@pytest.mark.parametrize("name", ["completions_per_prompt", "max_new_tokens", "temperature"])
def test_sampling_settings_are_positive(name):
    with pytest.raises(ConfigurationError, match=f"{name}: must be positive and finite, got 0"):
        Sampling(**{name: 0})


def test_completions_that_have_ended_leave_the_batch(model):
    """The rows that are read shrink, and every token is that of the prompt sampled alone."""
    prompts = torch.randint(1, 5, (16, 3), generator=torch.Generator().manual_seed(1))
    mask, sampling = torch.ones_like(prompts), Sampling(2, 12, 5.0)
    sample(model, PROMPTS, MASK, 1)  # after which the model is known to continue from its cache
    read = []
    counting = model.register_forward_pre_hook(
        lambda _, __, inputs: read.append(len(inputs["input_ids"])), with_kwargs=True
    )
    found = [
        generate_completions(
            model,
            prompts[rows],
            mask[rows],
            sampling,
            seed=3,
            ends=[0, 3],
            pad_token_id=5,
            rows_before=before,
        ).completions
        for rows, before in [(slice(None), 0), *((slice(n, n + 1), 2 * n) for n in range(16))]
    ]
    counting.remove()
    whole, *single = found
    rows = read[1 : whole.shape[1]]
    assert rows[0] == 32
    assert rows[-1] <= 16
    for pair, alone in zip(whole.split(2), single, strict=True):
        assert torch.equal(pair[:, : alone.shape[1]], alone)
        assert (pair[:, alone.shape[1] :] == 5).all()
