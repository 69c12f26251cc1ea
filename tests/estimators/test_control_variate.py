import pytest
import torch
from enumerated import Case, exact_gradient, expected_batch_gradient, rows_of

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import (
    EstimatorMemory,
    MonteCarlo,
    RaoBlackwell,
    RaoBlackwellControlVariate,
    TiltedRaoBlackwell,
)
from lit_klrb.estimators.cross_fit import EarlierRollouts, FitSums, cross_fitted_coefficients
from lit_klrb.estimators.fitted import FittedEstimator
from lit_klrb.functional import TokenStats

BETA = 0.4
SETTINGS = {"beta": BETA, "group_size": 2}
DIRECTIONS = ("kl", "token_values", "leave_one_out", "constant", "prefix_rewards")


@pytest.mark.parametrize(
    ("contexts", "vocab", "length", "groups", "group_size", "baseline"),
    [(2, 2, 2, 3, 2, "leave_one_out"), (1, 2, 2, 6, 1, None), (3, 3, 1, 3, 2, "leave_one_out")],
)
@pytest.mark.parametrize(
    ("off_policy", "beta"), [("none", None), ("none", BETA), ("prefix", BETA), ("sequence", BETA)]
)
def test_unbiased_over_all_batches(contexts, vocab, length, groups, group_size, baseline, off_policy, beta):
    """Coefficients depend on all groups, so the expectation is over all batches of at least three groups."""
    case = Case.random(contexts, vocab, length, seed=3)
    estimator = RaoBlackwellControlVariate(baseline=baseline, off_policy=off_policy)
    gradient, weights = expected_batch_gradient(
        case, estimator, groups, group_size, beta=beta, off_policy=off_policy != "none"
    )
    assert weights.kl.abs().max() > 0.05, "the coefficients must be at work"
    assert weights.value.abs().max() > 0.01
    torch.testing.assert_close(gradient, exact_gradient(case, beta), rtol=0, atol=1e-10)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("off_policy", ["none", "prefix"])
def test_each_direction_alone_is_unbiased_over_all_batches(direction, off_policy):
    case = Case.random(2, 2, 2, seed=4)
    estimator = RaoBlackwellControlVariate(directions=(direction,), off_policy=off_policy)
    gradient, weights = expected_batch_gradient(
        case, estimator, 3, 2, beta=BETA, off_policy=off_policy != "none"
    )
    assert weights.kl.any() == (direction == "kl")
    assert weights.value.any() == (direction == "token_values")
    torch.testing.assert_close(gradient, exact_gradient(case, BETA), rtol=0, atol=1e-10)


class WithPosition(FittedEstimator):
    """A `FittedEstimator` of one's own, with a direction of its own: the token's position as a baseline."""

    direction_names = ("position",)

    def loss_recipes(self, weights, beta):
        return [(MonteCarlo.recipe, beta)]

    def pathwise_weights(self, coefficients, mask, beta):
        return torch.zeros_like(mask), torch.zeros_like(mask)

    formula = "c_t = sum_s r_s - g t, l_t = 0"

    def terms(self, stats, mask, rewards, beta, group_size):
        origin = self.score(stats, mask, [(MonteCarlo.recipe, beta)], rewards, group_size)
        return origin, {"position": torch.arange(1.0, mask.shape[1] + 1, dtype=origin.dtype) * mask}


def test_a_direction_of_ones_own_is_unbiased_and_remembered():
    case = Case.random(2, 2, 2, seed=4)
    gradient, _ = expected_batch_gradient(case, WithPosition(), 3, 2, beta=BETA)
    torch.testing.assert_close(gradient, exact_gradient(case, BETA), rtol=0, atol=1e-10)
    stats, mask, rewards = random_stats(4, 2, seed=1)
    memory = EstimatorMemory(WithPosition())
    tokens = torch.zeros_like(mask, dtype=torch.long)
    stats = stats._replace(value=None, expected_value=None)
    first, second = (
        (
            memory.weights(stats, mask, rewards, **SETTINGS, tokens=tokens),
            memory.observe(tokens, mask, rewards, stats, group_size=2),
        )[0]
        for _ in range(2)
    )
    assert not torch.equal(first.score, second.score)
    again = EstimatorMemory(WithPosition())
    again.load_state_dict(memory.state_dict())
    undeclared = type("Undeclared", (WithPosition,), {"direction_names": ("kl",)})()
    with pytest.raises(ConfigurationError, match="position is not among direction_names: kl"):
        undeclared.weights(stats, mask, rewards, **SETTINGS)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("off_policy", ["none", "prefix"])
def test_unbiased_with_coefficients_of_earlier_rollouts(groups, off_policy):
    """The sums of other completions, so that coefficients are at work with a single prompt."""
    case = Case.random(2, 2, 2, seed=3)
    estimator = RaoBlackwellControlVariate(off_policy=off_policy)
    rows = torch.randint(len(case.rewards), (16,), generator=torch.Generator().manual_seed(0))
    stats, mask = rows_of(case.stats(case.behaviour.logits), rows), case.sequences[1][rows]
    earlier = estimator.fitted_weights(None, stats, mask, case.rewards[rows], **SETTINGS)[1]
    earlier = earlier._replace(target=-20 * earlier.target)  # any coefficients will do
    gradient, weights = expected_batch_gradient(
        case, estimator, groups, 2, beta=BETA, off_policy=off_policy != "none", earlier=earlier
    )
    assert weights.kl.abs().max() > 0.05
    torch.testing.assert_close(gradient, exact_gradient(case, BETA), rtol=0, atol=1e-10)


def test_earlier_groups_count_as_other_groups_of_the_batch():
    estimator = RaoBlackwellControlVariate()
    stats, mask, rewards = random_stats(5, 2, seed=1)
    whole = estimator.weights(stats, mask, rewards, **SETTINGS)
    before, now = ((rows_of(stats, rows), mask[rows], rewards[rows]) for rows in (slice(4), slice(4, 10)))
    earlier = estimator.fitted_weights(None, *before, **SETTINGS)[1]
    weights = estimator.fitted_weights(earlier, *now, **SETTINGS)[0]
    for own, of_whole in zip(weights, whole, strict=True):
        torch.testing.assert_close(own, of_whole[4:], rtol=1e-10, atol=1e-10)


def test_sums_of_earlier_rollouts_decay_and_ignore_what_is_not_finite():
    earlier, expected = EarlierRollouts(decay=0.5), None
    for seed in (1, 2, 3):
        stats, mask, rewards = random_stats(3, 2, seed)
        sums = RaoBlackwellControlVariate().fitted_weights(None, stats, mask, rewards, **SETTINGS)[1]
        earlier.observe(sums)
        earlier.observe(sums._replace(squares=sums.squares * torch.nan))
        expected = sums if expected is None else FitSums(*map(lambda a, b: a + 0.5 * b, sums, expected))
    for own, other in zip(earlier.sums, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
    assert earlier.sums.groups.item() == 3 * 1.75
    again = EarlierRollouts()
    again.load_state_dict(earlier.state_dict())
    assert all(map(torch.equal, again.sums, earlier.sums))
    again.load_state_dict(EarlierRollouts().state_dict())
    assert again.sums is None
    with pytest.raises(ConfigurationError, match="has sums of 5 directions, where the estimator has 6"):
        EarlierRollouts(size=6).load_state_dict(earlier.state_dict())


def random_stats(groups, group_size, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(groups * group_size, 4, dtype=torch.float64, generator=generator)

    mask = torch.arange(4) < torch.randint(1, 5, (groups * group_size, 1), generator=generator)
    rewards = torch.randn(groups * group_size, generator=generator, dtype=torch.float64)
    stats = TokenStats(
        draw(), draw(), draw().square(), draw().square(), draw(), draw(), reward_to_come=draw()
    )
    return stats, mask, rewards


def plain_coefficients(origin, directions, group_size):
    """For each group: least squares with a row per direction as its penalty, and some nearer to [0, 1]."""
    groups = len(origin) // group_size
    result = []
    for own in range(groups if groups > 2 else 0):
        used = torch.ones(groups, group_size, dtype=torch.bool)
        used[own] = False
        rows = used.flatten()
        columns = torch.stack([values[rows].flatten() for values in directions.values()], 1)
        target = -origin[rows].flatten()
        sizes = target.view(groups - 1, -1).square().sum(1)
        effective = ((groups - 1) * sizes.sum() ** 2 / sizes.square().sum()).sqrt()
        floor = (
            torch.tensor([0.0 if name == "constant" else 1e-3 for name in directions]) * target.square().sum()
        )
        penalty = ((columns.square().sum(0) + floor) / effective).sqrt().diag()
        matrix, goal = torch.cat([columns, penalty]), torch.cat([target, torch.zeros(len(directions))])
        free = torch.linalg.lstsq(matrix, goal[:, None], driver="gelsd").solution[:, 0]
        fixed = torch.tensor([name in ("kl", "token_values") for name in directions])
        if fixed.any():
            best = free[fixed]
            near = (32 * best.clamp(0, 1) + effective * best) / (32 + effective)
            left = goal - matrix[:, fixed] @ near
            free[~fixed] = torch.linalg.lstsq(matrix[:, ~fixed], left[:, None], driver="gelsd").solution[:, 0]
            free[fixed] = near
        result.append(free)
    found = torch.stack(result) if result else torch.zeros(groups, len(directions))
    return dict(zip(directions, found.to(origin.dtype).repeat_interleave(group_size, 0).T, strict=True))


@pytest.mark.parametrize(("groups", "group_size"), [(1, 2), (2, 3), (3, 2), (7, 1), (9, 4)])
@pytest.mark.parametrize("related", [-1.0, 0.0, 1.0, 4.0])
def test_coefficients_equal_their_definition(groups, group_size, related):
    *slopes, noise = torch.randn(
        4, groups * group_size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(groups)
    )
    directions = dict(zip(("kl", "token_values", "constant"), slopes, strict=True))
    directions["kl"][: group_size if groups > 4 else 0] = 0
    directions["token_values"] *= 0.03  # all but negligible
    origin = noise - related * directions["kl"]
    coefficients = cross_fitted_coefficients(origin, directions, group_size)
    for name, plain in plain_coefficients(origin, directions, group_size).items():
        torch.testing.assert_close(coefficients[name][:, 0], plain)
        assert plain.any() == (groups > 2)
    if groups > 2 and related in (-1, 4):
        beyond = coefficients["kl"] < 0 if related == -1 else coefficients["kl"] > 1
        assert beyond.all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [0.0, 1e-17])
def test_negligible_directions_have_coefficient_zero(size):
    """With equal completions the centred values of the KL are rounding errors."""
    noise = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    coefficients = cross_fitted_coefficients(noise, {"kl": size * noise, "token_values": 0 * noise}, 2)
    assert all((values * size).abs().max() < 1e-12 for values in coefficients.values())
    assert not cross_fitted_coefficients(0 * noise, {"kl": noise}, 2)["kl"].any()


@pytest.mark.parametrize("off_policy", ["none", "prefix", "sequence", "clip"])
def test_with_fewer_than_three_groups_it_is_monte_carlo(off_policy):
    stats, mask, rewards = random_stats(2, 3, seed=2)
    behaviour = stats.logprobs - 0.1
    losses = [
        kind(off_policy=off_policy).objective(
            stats.map(torch.Tensor.requires_grad_),
            mask,
            rewards,
            beta=BETA,
            group_size=3,
            behaviour_logprobs=behaviour,
        )
        for kind in (RaoBlackwellControlVariate, MonteCarlo)
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)


@pytest.mark.parametrize("off_policy", ["none", "prefix", "sequence", "clip"])
@pytest.mark.parametrize("kind", [RaoBlackwell, TiltedRaoBlackwell])
def test_its_loss_includes_rao_blackwell_with_and_without_the_tilt(kind, off_policy):
    stats, mask, rewards = random_stats(4, 2, seed=3)
    if kind is RaoBlackwell:
        stats = stats._replace(value=None, expected_value=None)
    estimators = [one(off_policy=off_policy) for one in (RaoBlackwellControlVariate, kind)]
    weights = estimators[1].weights(stats, mask, rewards, **SETTINGS)
    losses = [
        estimator.loss(stats, mask, weights, beta=BETA, behaviour_logprobs=stats.logprobs - 0.1)
        for estimator in estimators
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
    assert [estimator.is_fusable for estimator in estimators] == [off_policy in ("none", "clip")] * 2


@pytest.mark.parametrize(
    ("direction", "fields"),
    [("token_values", ("value", "expected_value")), ("prefix_rewards", ("reward_to_come",))],
)
def test_without_what_a_direction_reads_the_others_are_used(direction, fields):
    stats, mask, rewards = random_stats(6, 2, seed=3)
    plain = stats._replace(**dict.fromkeys(fields))
    others = tuple(name for name in DIRECTIONS if name != direction)
    without, fewer = (
        RaoBlackwellControlVariate(directions=directions).weights(plain, mask, rewards, **SETTINGS)
        for directions in (DIRECTIONS, others)
    )
    assert torch.equal(without.score, fewer.score)
    assert (without.value is None) == (direction == "token_values")
    table = RaoBlackwellControlVariate().weights(stats, mask, rewards, **SETTINGS)
    assert not torch.allclose(table.score, without.score)


def test_with_the_rewards_of_prefixes_a_token_is_credited_with_what_the_reward_changes_from_it_on():
    """Rewards that are known before the last token: with a coefficient near 1 nothing is left to credit."""
    stats, mask, rewards = random_stats(40, 2, seed=5)
    stats = stats._replace(reward_to_come=torch.zeros_like(stats.logprobs))
    estimator = RaoBlackwellControlVariate(directions=("prefix_rewards",))
    left, whole = (
        one.weights(stats, mask, rewards, beta=0.0, group_size=2).score for one in (estimator, MonteCarlo())
    )
    assert left.square().sum() < 0.01 * whole.square().sum()


@pytest.mark.parametrize("wrong", [(), ("klr",), ("kl", "kl")])
def test_directions_are_checked(wrong):
    with pytest.raises(ConfigurationError, match="directions: must be different ones of kl, token_values"):
        RaoBlackwellControlVariate(directions=wrong)


@pytest.mark.parametrize("off_policy", ["none", "prefix", "clip"])
def test_micro_batches_and_padding_have_no_influence(off_policy):
    stats, mask, rewards = random_stats(5, 2, seed=4)
    estimator = RaoBlackwellControlVariate(off_policy=off_policy)
    with torch.no_grad():
        whole = estimator.objective(stats, mask, rewards, **SETTINGS)
    junk = stats.map(lambda field: torch.where(mask, field, torch.nan))
    weights = estimator.weights(junk, mask, rewards, **SETTINGS)
    assert not any(field[~mask].any() for field in weights)
    parts = [
        estimator.loss(
            rows_of(junk, rows), mask[rows], weights.map(lambda field, rows=rows: field[rows]), beta=BETA
        )
        * len(rows)
        for rows in torch.arange(10).split(3)
    ]
    assert whole.item() == pytest.approx(sum(parts).item() / 10, abs=1e-12)
