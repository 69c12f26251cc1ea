import itertools
import math

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.enumeration import (
    TabularLM,
    exact_kl,
    exact_kl_gradient,
    exact_objective,
    num_prefixes,
    optimal_policy,
)

# contexts, V, T, EOS: one row per prefix; Markov of order 1; shared rows; a single row; T = 1
SHAPES = [(7, 3, 3, 0), (3, 4, 3, 2), (5, 3, 4, 1), (1, 2, 5, 1), (1, 5, 1, 4)]


def random_model(shape, seed):
    contexts, vocab_size, max_length, eos = shape
    logits = torch.randn(
        contexts, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return TabularLM(logits, max_length, eos)


def plain_completions(model):
    """Every completion as a tuple of tokens, by brute force over V ** T strings."""
    found = set()
    for string in itertools.product(range(model.vocab_size), repeat=model.max_length):
        end = string.index(model.eos_token_id) + 1 if model.eos_token_id in string else model.max_length
        found.add(string[:end])
    return found


def plain_logprob(model, completion):
    """Walk the table token by token, numbering prefixes by counting them in breadth-first order."""
    others = [v for v in range(model.vocab_size) if v != model.eos_token_id]
    number = {
        prefix: i
        for i, prefix in enumerate(
            p for t in range(model.max_length) for p in itertools.product(others, repeat=t)
        )
    }
    total = 0.0
    for t, token in enumerate(completion):
        row = model.logits[number[completion[:t]] % len(model.logits)].tolist()
        total += row[token] - math.log(sum(math.exp(x) for x in row))
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_are_all_completions_with_their_probability(shape):
    model = random_model(shape, 0)
    tokens, mask = model.sequences()
    completions = [tuple(row[:n]) for row, n in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]
    assert set(completions) == plain_completions(model)
    assert len(completions) == len(set(completions))
    assert (tokens[~mask] == model.eos_token_id).all()
    expected = torch.tensor([plain_logprob(model, c) for c in completions], dtype=torch.float64)
    torch.testing.assert_close(model.logprobs(tokens, mask), expected, rtol=0, atol=1e-12)
    assert model.logprobs(tokens, mask).exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_rows_follow_the_documented_sharing():
    tokens = torch.tensor([[1, 2, 1, 0], [2, 2, 1, 0]])
    markov = TabularLM(torch.zeros(2, 3), max_length=4).prefixes(tokens) % 2
    assert markov[:, 1:].tolist() == [[1, 0, 1], [0, 0, 1]]
    own = TabularLM(torch.zeros(num_prefixes(3, 4), 3), max_length=4)
    complete, mask = own.sequences()
    seen = {
        tuple(row[:t]): int(own.prefixes(complete)[n, t])
        for n, row in enumerate(complete.tolist())
        for t in range(4)
        if mask[n, t]
    }
    assert sorted(seen.values()) == list(range(num_prefixes(3, 4)))


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_kl_is_the_plain_sum_over_completions(shape):
    policy, reference = random_model(shape, 1), random_model((2, *shape[1:]), 2)
    expected = sum(
        math.exp(plain_logprob(policy, c)) * (plain_logprob(policy, c) - plain_logprob(reference, c))
        for c in plain_completions(policy)
    )
    assert exact_kl(policy, reference).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_kl_gradient_is_the_score_function_sum_and_finite_differences(shape):
    policy, reference = random_model(shape, 3), random_model(shape, 4)
    gradient = exact_kl_gradient(policy, reference)
    tokens, mask = policy.sequences()
    # Theorem-free form: sum_y p(y) R(y) grad log p(y), one completion at a time
    by_score = torch.zeros_like(gradient)
    probabilities = policy.logprobs(tokens, mask).exp()
    log_ratio = policy.logprobs(tokens, mask) - reference.logprobs(tokens, mask)
    rows = policy.prefixes(tokens) % len(policy.logits)
    for n in range(len(tokens)):
        for t in range(int(mask[n].sum())):
            score = -policy.logits[rows[n, t]].softmax(-1)
            score[tokens[n, t]] += 1
            by_score[rows[n, t]] += probabilities[n] * log_ratio[n] * score
    torch.testing.assert_close(gradient, by_score, rtol=0, atol=1e-12)
    step = torch.zeros_like(policy.logits)
    step[-1, -1] = 1e-6
    up, down = (exact_kl(TabularLM(policy.logits + sign * step, *shape[2:]), reference) for sign in (1, -1))
    assert gradient[-1, -1].item() == pytest.approx(((up - down) / 2e-6).item(), abs=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_optimal_policy_is_the_tilted_reference_and_a_stationary_maximum(shape, beta):
    reference = random_model(shape, 5)
    tokens, mask = reference.sequences()
    reward = torch.randn(len(tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    optimum = optimal_policy(reference, reward, beta)
    tilted = (reference.logprobs(tokens, mask) + reward / beta).log_softmax(0)
    torch.testing.assert_close(optimum.logprobs(tokens, mask), tilted, rtol=0, atol=1e-12)

    leaf = optimum.logits.clone().requires_grad_()
    value = exact_objective(TabularLM(leaf, *shape[2:]), reference, reward, beta)
    (slope,) = torch.autograd.grad(value, leaf)
    assert slope.abs().max() < 1e-12
    expected = beta * (reference.logprobs(tokens, mask) + reward / beta).logsumexp(0)
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    assert value > exact_objective(reference, reference, reward, beta)


def test_excluded_tokens_cost_nothing_when_shared_and_everything_when_not():
    reference = random_model((3, 4, 3, 0), 8)
    reference.logits[1, 2] = -math.inf
    policy = random_model((3, 4, 3, 0), 9)
    policy.logits[1, 2] = -math.inf
    smaller = TabularLM(policy.logits.masked_fill(policy.logits.isneginf(), -800), 3)
    assert exact_kl(policy, reference).item() == pytest.approx(
        exact_kl(
            smaller, TabularLM(reference.logits.masked_fill(reference.logits.isneginf(), -800), 3)
        ).item()
    )
    assert exact_kl_gradient(policy, reference).isfinite().all()
    assert exact_kl(random_model((3, 4, 3, 0), 9), reference) == math.inf
    tokens, mask = reference.sequences()
    optimum = optimal_policy(reference, torch.ones(len(tokens)), 1.0)
    torch.testing.assert_close(optimum.logprobs(tokens, mask), reference.logprobs(tokens, mask))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TabularLM(torch.zeros(3), 2), "logits: must have shape"),
        (lambda: TabularLM(torch.zeros(1, 2), 0), "max_length: must be at least 1, got 0"),
        (lambda: TabularLM(torch.zeros(1, 2), 2, 2), "eos_token_id: must be in 0..1, got 2"),
        (
            lambda: exact_kl(TabularLM(torch.zeros(1, 2), 2), TabularLM(torch.zeros(1, 2), 3)),
            "max_length = 3",
        ),
        (
            lambda: optimal_policy(TabularLM(torch.zeros(1, 2), 2), torch.zeros(3), 0.0),
            "beta: must be positive, got 0.0",
        ),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()
