"""Token values against ridge regression on dense counts, and the rollouts that they depend on."""

import pytest
import torch
from torch.nn.functional import one_hot

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators.token_values import TokenValues

V, K = 12, 3
RIDGES = (0.5, 4.0)


def rollouts(count, seed=0, noise=0.3, groups=6):
    """Completions of at most seven frequent and rare tokens; rewards are sums of token values plus noise."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(V, generator=generator)
    frequency = 1.0 / torch.arange(1, V + 1)
    for _ in range(count):
        tokens = torch.multinomial(frequency, groups * K * 7, True, generator=generator).view(-1, 7)
        mask = torch.arange(7) < torch.randint(1, 8, (len(tokens), 1), generator=generator)
        prompts = 5 * torch.randn(groups, generator=generator).repeat_interleave(K)
        rewards = (truth[tokens] * mask).sum(1) + prompts
        yield tokens, mask, rewards + noise * torch.randn(len(tokens), generator=generator)


def centred(values):
    return (
        values.view(-1, K, *values.shape[1:]) - values.view(-1, K, *values.shape[1:]).mean(1, True)
    ).flatten(0, 1)


def dense(rolls):
    """Centred counts [n, V] and rewards [n] of several rollouts."""
    counts, rewards = [], []
    for tokens, mask, reward in rolls:
        counts.append(centred((one_hot(tokens, V) * mask[..., None]).sum(1).double()))
        rewards.append(centred(reward.double()))
    return torch.cat(counts), torch.cat(rewards)


def exact(rolls, ridge, prior=0.0):
    counts, rewards = dense(rolls)
    right = counts.T @ rewards + ridge * prior
    return torch.linalg.solve(counts.T @ counts + ridge * torch.eye(V).double(), right)


def followed(rolls, prior=None, **options):
    """Token values after all rollouts, and the table with which each was weighted."""
    values, tables = TokenValues(**{"ridges": RIDGES, "iterations": 60, **options}), []
    if prior is not None:
        values.start_from(prior)
    for tokens, mask, rewards in rolls:
        values.fit(V)
        tables.append(values.table)
        values.observe(tokens, mask, rewards, K)
    return values, tables


def test_a_table_is_the_ridge_regression_of_the_rollouts_before_it():
    rolls = list(rollouts(3))
    _, (first, second, third) = followed(rolls)
    assert first is None
    # Nothing has been predicted before the second: the larger penalty.
    torch.testing.assert_close(second, exact(rolls[:1], 4.0).float())
    choices = [exact(rolls[:2], ridge).float() for ridge in RIDGES]
    counts, rewards = dense(rolls[1:2])
    errors = [(rewards - counts @ exact(rolls[:1], ridge)).square().sum() for ridge in RIDGES]
    torch.testing.assert_close(third, choices[int(errors[1] < errors[0])])
    assert (choices[0] - choices[1]).abs().max() > 0.01


def test_few_steps_from_the_previous_table_approximate_it():
    rolls = list(rollouts(6))
    truth = followed(rolls)[1][-1]
    few, cold = (followed(rolls[i:], iterations=3)[1][-1] for i in (0, 4))
    cold_truth = followed(rolls[4:])[1][-1]
    assert (few - truth).norm() < 0.02 * truth.norm()
    assert (few - truth).norm() / truth.norm() < (cold - cold_truth).norm() / cold_truth.norm()


def test_the_penalty_is_the_one_that_predicted_best():
    for noise, expected in ((0.01, 0), (6.0, 1)):
        rolls = list(rollouts(8, seed=2, noise=noise))
        values, _ = followed(rolls, ridges=(0.5, 60.0))
        values.fit(V)
        torch.testing.assert_close(
            values.table, exact(rolls, (0.5, 60.0)[expected]).float(), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("reward", ["noise", "constant"])
def test_rewards_unrelated_to_tokens_give_a_table_of_zeros(reward):
    rolls = list(rollouts(6, seed=3))
    generator = torch.Generator().manual_seed(1)
    draw = torch.zeros_like if reward == "constant" else lambda r: torch.randn(r.shape, generator=generator)
    values, tables = followed([(tokens, mask, draw(rewards)) for tokens, mask, rewards in rolls])
    assert not tables[-1].any()
    assert values.explained == 0


def test_the_share_explained_is_a_decaying_average_of_predictions_before_each_fit():
    rolls = list(rollouts(3, noise=1.0))
    values, _ = followed(rolls, window=36)  # two rollouts; errors halve as often
    errors = torch.zeros(3).double()
    for index in (1, 2):
        counts, rewards = dense(rolls[index : index + 1])
        tables = torch.stack([*(exact(rolls[:index], ridge) for ridge in RIDGES), torch.zeros(V).double()], 1)
        errors = 0.5**0.5 * errors + (rewards[:, None] - counts @ tables).square().sum(0)
    assert values.explained == pytest.approx(float(1 - errors.min() / errors[-1]))


def test_the_oldest_groups_leave_the_window_whole():
    rolls = list(rollouts(4))
    values, _ = followed(rolls, window=40, ridges=(1.0,))  # two rollouts of 18, and a group and a bit
    values.fit(V)
    kept = [tuple(field[-3:] for field in rolls[1]), *rolls[2:]]
    torch.testing.assert_close(values.table, exact(kept, 1.0).float())


def test_padding_has_no_influence():
    rolls = list(rollouts(3))
    junk = [
        (
            torch.cat([torch.where(mask, tokens, 10**6), tokens], 1),
            torch.cat([mask, mask & False], 1),
            rewards,
        )
        for tokens, mask, rewards in rolls
    ]
    assert torch.equal(followed(junk)[1][-1], followed(rolls)[1][-1])


def test_tables_shrink_towards_a_prior_that_predicts_better_than_zero():
    rolls = list(rollouts(3, noise=1.0))
    prior = exact(list(rollouts(20, noise=1.0))[3:], 1.0)
    _, (first, second, third) = followed(rolls, prior.float())
    # Nothing has been predicted before the first
    assert torch.equal(first, torch.zeros(V))
    torch.testing.assert_close(second, exact(rolls[:1], 4.0, prior).float(), atol=1e-4, rtol=0)
    counts, rewards = dense(rolls[:1])
    assert (rewards - counts @ prior).square().sum() < rewards.square().sum()
    candidates = [(ridge, towards) for towards in (0.0, prior) for ridge in RIDGES]
    errors = [(dense(rolls[:1])[1] - counts @ start).square().sum() for start in (0 * prior, prior)]
    errors = torch.stack(errors).repeat_interleave(2)
    counts, rewards = dense(rolls[1:2])
    new = [(rewards - counts @ exact(rolls[:1], *candidate)).square().sum() for candidate in candidates]
    # Errors lose half their weight per window, which is not full
    best = int((0.5 ** (18 / 2048) * errors + torch.stack(new)).argmin())
    assert best >= 2
    torch.testing.assert_close(third, exact(rolls[:2], *candidates[best]).float(), atol=1e-4, rtol=0)


def test_a_prior_of_another_reward_is_not_used():
    rolls = list(rollouts(3, noise=0.01))
    _, (first, second, third) = followed(rolls, -10 * torch.ones(V).cumsum(0))
    assert not first.any()
    assert not second.any()  # zeros predicted the first rollout best, as nothing had been fitted
    torch.testing.assert_close(third, exact(rolls[:2], 0.5).float(), atol=1e-4, rtol=0)


def test_a_prior_of_another_vocabulary_is_refused():
    values = TokenValues()
    values.start_from(torch.zeros(V + 1))
    with pytest.raises(ConfigurationError, match=r"policy_path: holds token values of 13 tokens, but .* 12"):
        values.fit(V)


def test_completions_that_are_all_there_choose_the_penalty_part_by_part():
    rolls = list(rollouts(8, noise=6.0))
    values = TokenValues.of_completions(rolls, K, V)
    counts, rewards = dense(rolls)
    choices = {ridge: exact(rolls, ridge).float() for ridge in (2.0, 8.0, 32.0, 128.0)}
    errors = dict.fromkeys(choices, 0.0)
    for index in range(1, len(rolls)):
        counts, rewards = dense(rolls[index : index + 1])
        for ridge in choices:
            error = (rewards - counts @ exact(rolls[:index], ridge)).square().sum()
            errors[ridge] = 0.5 ** (1 / len(rolls)) * errors[ridge] + error
    torch.testing.assert_close(values.table, choices[min(errors, key=errors.get)], atol=1e-3, rtol=0)
    assert len({table.norm().item() for table in choices.values()}) == len(choices)


@pytest.mark.parametrize("prior", [None, torch.linspace(-1, 1, V)])
def test_a_saved_state_continues_bit_exactly(prior):
    rolls = list(rollouts(6))
    straight, _ = followed(rolls, prior, iterations=2, window=50)
    begun, _ = followed(rolls[:3], prior, iterations=2, window=50)
    begun.fit(V)
    resumed = TokenValues(ridges=RIDGES, iterations=2, window=50)
    resumed.load_state_dict(begun.state_dict())
    assert torch.equal(resumed.table, begun.table)
    for index, (tokens, mask, rewards) in enumerate(rolls[3:]):
        if index:
            resumed.fit(V)
        resumed.observe(tokens, mask, rewards, K)
    for name, field in straight.state_dict().items():
        other = resumed.state_dict()[name]
        assert torch.equal(field, other) if isinstance(field, torch.Tensor) else field == other, name


@pytest.mark.parametrize("wrong", [{"window": 0}, {"iterations": 0}, {"ridges": ()}, {"ridges": (1.0, -1.0)}])
def test_settings_are_checked(wrong):
    with pytest.raises(ConfigurationError, match=f"^{next(iter(wrong))}: must be"):
        TokenValues(**wrong)


def test_groups_of_another_size_and_other_ridges_are_refused():
    values, _ = followed(rollouts(1))
    tokens, mask, rewards = next(rollouts(1))
    with pytest.raises(ConfigurationError, match="group_size: must be 3 as before, got 2"):
        values.observe(tokens, mask, rewards, 2)
    for state in (values, followed(rollouts(1), prior=torch.zeros(V))[0]):
        problem = f"ckpt_path: has token values of {len(RIDGES)} ridges, where the estimator has 1"
        with pytest.raises(ConfigurationError, match=problem):
            TokenValues(ridges=(1.0,)).load_state_dict(state.state_dict())
