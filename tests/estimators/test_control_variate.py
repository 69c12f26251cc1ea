import pytest
import torch
from enumerated import Case

from lit_klrb.estimators import LossWeights, MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate
from lit_klrb.estimators.control_variate import cross_fitted_coefficients
from lit_klrb.functional import TokenStats
from lit_klrb.functional.enumeration import TabularLM, exact_kl_gradient, exact_objective

BETA = 0.4


def rows_of(stats, rows):
    return stats.map(lambda field: field[rows])


def expected_batch_gradient(case, estimator, groups, group_size, *, beta=None, off_policy=False):
    """Over every batch of `groups` groups: a coefficient couples all groups of a batch."""
    mask = case.sequences[1]
    logits = case.policy.logits.clone().requires_grad_()
    current, generated = case.stats(logits), case.stats(case.behaviour.logits)
    rollout = generated if off_policy else current
    logprob = torch.where(mask, rollout.logprobs, 0).sum(-1).detach()
    batches = case.groups(groups * group_size)
    by_batch = [
        estimator.weights(
            rows_of(rollout.detach(), batch),
            mask[batch],
            None if beta is None else case.rewards[batch],
            beta=beta or 1.0,
            group_size=group_size,
        )
        for batch in batches
    ]
    weights = LossWeights(*map(torch.cat, zip(*(part[:2] for part in by_batch), strict=True)))
    rows = batches.flatten()
    leaf = current.map(lambda field: field[rows].detach().requires_grad_())
    estimator.loss(
        leaf,
        mask[rows],
        weights,
        beta=beta or 1.0,
        behaviour_logprobs=generated.logprobs[rows].detach() if off_policy else None,
    ).backward()
    scale = (logprob[batches].sum(-1).exp() * len(batches)).repeat_interleave(groups * group_size)[:, None]
    total = (scale * (leaf.logprobs.grad * current.logprobs[rows] + leaf.kl.grad * current.kl[rows])).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient, weights


@pytest.mark.parametrize(
    ("contexts", "vocab", "length", "groups", "group_size", "baseline"),
    [(2, 2, 2, 3, 2, "leave_one_out"), (1, 2, 2, 6, 1, None), (3, 3, 1, 3, 2, "leave_one_out")],
)
@pytest.mark.parametrize("off_policy", ["none", "prefix", "sequence"])
@pytest.mark.parametrize("beta", [None, BETA])
def test_unbiased_over_every_batch(contexts, vocab, length, groups, group_size, baseline, off_policy, beta):
    case = Case.random(contexts, vocab, length, seed=3)
    estimator = RaoBlackwellControlVariate(baseline=baseline, off_policy=off_policy)
    gradient, weights = expected_batch_gradient(
        case, estimator, groups, group_size, beta=beta, off_policy=off_policy != "none"
    )
    assert weights.kl.abs().max() > 0.05, "the coefficients must be at work"
    if beta is None:
        expected = exact_kl_gradient(case.policy, case.reference)
    else:
        leaf = case.policy.logits.clone().requires_grad_()
        value = exact_objective(TabularLM(leaf, length), case.reference, case.rewards, beta)
        expected = -torch.autograd.grad(value, leaf)[0]
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


def random_stats(groups, group_size, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(groups * group_size, 4, dtype=torch.float64, generator=generator)

    mask = torch.arange(4) < torch.randint(1, 5, (groups * group_size, 1), generator=generator)
    rewards = torch.randn(groups * group_size, generator=generator, dtype=torch.float64)
    return TokenStats(draw(), draw(), draw().square(), draw().square()), mask, rewards


def plain_coefficients(at_zero, slope, group_size):
    """The definition, group by group, in plain loops."""
    groups = range(len(slope) // group_size)
    members = [slice(g * group_size, (g + 1) * group_size) for g in groups]
    product = [float((at_zero[m] * slope[m]).sum()) for m in members]
    square = [float((slope[m] ** 2).sum()) for m in members]

    def least_squares(used):
        bottom = sum(square[g] for g in used)
        return -sum(product[g] for g in used) / bottom if bottom else 0.0

    result = []
    for own in groups:
        others = [g for g in groups if g != own]
        fits = {g: least_squares([h for h in others if h != g]) for g in others}
        gain = {g: -fits[g] * product[g] for g in others}
        cost = {g: fits[g] ** 2 * square[g] for g in others}
        if not sum(cost.values()):
            result.append(0.0)
            continue
        share = min(max(sum(gain.values()) / sum(cost.values()), 0), 1)
        error = sum((gain[g] - share * cost[g]) ** 2 for g in others) ** 0.5 / sum(cost.values())
        result.append(max(share - error, 0) * least_squares(others))
    return torch.tensor(result, dtype=slope.dtype).repeat_interleave(group_size)


@pytest.mark.parametrize(("groups", "group_size"), [(1, 2), (2, 3), (3, 2), (7, 1), (9, 4)])
@pytest.mark.parametrize("related", [0.0, 1.0])
def test_coefficients_are_their_definition(groups, group_size, related):
    slope, noise = torch.randn(
        2, groups * group_size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(groups)
    )
    slope[: group_size if groups > 4 else 0] = 0
    at_zero = noise - related * slope
    coefficients = cross_fitted_coefficients(at_zero, slope, group_size)
    torch.testing.assert_close(coefficients, plain_coefficients(at_zero, slope, group_size))
    if groups < 3:
        assert not coefficients.any()


def test_coefficients_on_which_all_groups_agree_are_used_whole_and_contradicted_ones_not_at_all():
    slope = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        cross_fitted_coefficients(-0.7 * slope, slope, 2), torch.full((8,), 0.7, dtype=torch.float64)
    )
    slope = slope.sign()
    contradicted = slope * torch.tensor([1.0, 1, -1, -1, 1, 1, -1, -1])[:, None]
    assert not cross_fitted_coefficients(contradicted, slope, 2).any()


def test_one_group_of_overwhelming_size_leaves_no_rounding_in_the_others():
    slope, noise = torch.randn(2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slope[:2] *= 1e12
    coefficients = cross_fitted_coefficients(noise / 10 - slope, slope, 2)
    torch.testing.assert_close(coefficients, plain_coefficients(noise / 10 - slope, slope, 2))
    assert (coefficients[:2] > 0).all()


def test_a_groups_own_rollout_never_moves_its_coefficient():
    stats, mask, rewards = random_stats(6, 2, seed=1)
    estimator = RaoBlackwellControlVariate()
    before = estimator.weights(stats, mask, rewards, beta=BETA, group_size=2).kl
    stats.logprobs[4:6] += torch.randn(2, 4, dtype=torch.float64)
    after = estimator.weights(stats, mask, 10 * rewards.roll(1), beta=BETA, group_size=2).kl
    rewards[4:6] += 3
    moved = estimator.weights(stats, mask, rewards, beta=BETA, group_size=2).kl
    assert torch.equal(before[4:6], moved[4:6])
    assert not torch.equal(before[:4], moved[:4])
    assert not torch.equal(before[4:6], after[4:6])


@pytest.mark.parametrize("off_policy", ["none", "prefix", "sequence", "clip"])
def test_fewer_than_three_groups_are_monte_carlo(off_policy):
    stats, mask, rewards = random_stats(2, 3, seed=2)
    behaviour = stats.logprobs - 0.1
    losses = [
        kind(off_policy=off_policy).objective(
            stats, mask, rewards, beta=BETA, group_size=3, behaviour_logprobs=behaviour
        )
        for kind in (RaoBlackwellControlVariate, MonteCarlo)
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)


@pytest.mark.parametrize("off_policy", ["none", "prefix", "sequence", "clip"])
def test_a_coefficient_of_beta_is_rao_blackwell(off_policy):
    stats, mask, rewards = random_stats(4, 2, seed=3)
    estimators = [kind(off_policy=off_policy) for kind in (RaoBlackwellControlVariate, RaoBlackwell)]
    weights = estimators[1].weights(stats, mask, rewards, beta=BETA, group_size=2)
    assert torch.equal(weights.kl, BETA * mask.double())
    losses = [
        estimator.loss(stats, mask, weights, beta=BETA, behaviour_logprobs=stats.logprobs - 0.1)
        for estimator in estimators
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
    assert [estimator.is_fusable for estimator in estimators] == [off_policy in ("none", "clip")] * 2


@pytest.mark.parametrize("off_policy", ["none", "prefix", "clip"])
def test_micro_batches_and_padding_do_not_matter(off_policy):
    stats, mask, rewards = random_stats(5, 2, seed=4)
    estimator = RaoBlackwellControlVariate(off_policy=off_policy)
    whole = estimator.objective(stats, mask, rewards, beta=BETA, group_size=2)
    junk = stats.map(lambda field: torch.where(mask, field, torch.nan))
    weights = estimator.weights(junk, mask, rewards, beta=BETA, group_size=2)
    assert not any(field[~mask].any() for field in weights[:2])
    parts = [
        estimator.loss(
            rows_of(junk, rows), mask[rows], weights.map(lambda field, rows=rows: field[rows]), beta=BETA
        )
        * len(rows)
        for rows in torch.arange(10).split(3)
    ]
    assert whole.item() == pytest.approx(sum(parts).item() / 10, abs=1e-12)
