"""`RaoBlackwellTokenValues`: its formula, its expectation over all batches, and the fit of its table."""

import pytest
import torch
from enumerated import Case, exact_gradient, expected_batch_gradient, rows_of
from torch import Tensor
from torch.nn.functional import one_hot

from lit_klrb.estimators import RaoBlackwell, TiltedRaoBlackwell
from lit_klrb.estimators.token_values import TokenValues
from replication.to_come import RaoBlackwellTokenValues

CASE = Case.random(contexts=2, vocab_size=3, max_length=4, seed=5)
ROWS = torch.tensor([0, 7, 19, 30, 12, 4, 22, 9, 27])
BETA, GROUP = 0.4, 3


def rollout(token_values=True):
    stats = rows_of(CASE.stats(CASE.policy.logits), ROWS)
    if not token_values:
        stats = stats._replace(value=None, expected_value=None)
    return stats, CASE.sequences[1][ROWS], CASE.rewards[ROWS]


def plain_direction(stats, lengths, row, t, baseline, discount):
    """beta times [sum_{s>t} E_s[a] - sum_{s>=t} a(y_s)], less its mean over the others at t."""

    def difference(i):
        steps = range(t, lengths[i])
        terms = (
            discount ** (s - t) * ((stats.expected_value[i, s] if s > t else 0) - stats.value[i, s])
            for s in steps
        )
        return sum(terms, torch.zeros(()).double())

    first = row // GROUP * GROUP
    others = [i for i in range(first, first + GROUP) if i != row] if baseline else []
    return BETA * (difference(row) - sum(difference(i) for i in others) / max(len(others), 1))


@pytest.mark.parametrize("discount", [1.0, 0.7])
@pytest.mark.parametrize("baseline", [None, "leave_one_out"])
def test_the_direction_is_the_formula(baseline, discount):
    stats, mask, rewards = rollout()
    estimator = RaoBlackwellTokenValues(baseline=baseline, discount=discount)
    junk = stats.map(lambda field: torch.where(mask, field, torch.nan))
    origin, directions = estimator.terms(junk.masked(mask), mask, rewards, BETA, GROUP)
    plain = RaoBlackwell(baseline=baseline, discount=discount)
    assert torch.equal(origin, plain.weights(stats, mask, rewards, beta=BETA, group_size=GROUP).score)
    lengths = mask.sum(1).tolist()
    for row, length in enumerate(lengths):
        expected = [plain_direction(stats, lengths, row, t, baseline, discount) for t in range(length)]
        own = directions["token_values"][row]
        torch.testing.assert_close(own[:length], torch.stack(expected), rtol=0, atol=1e-12)
        assert not own[length:].any()
    weights = estimator.weights(junk, mask, rewards, beta=BETA, group_size=GROUP)
    g = weights.value[:, :1] / BETA
    assert g.abs().max() > 0.001
    torch.testing.assert_close(weights.score, origin + g * directions["token_values"])
    assert torch.equal(weights.kl, BETA * mask.double())
    assert not weights.value[~mask].any()


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(
    ("contexts", "vocab", "length", "groups", "group_size", "baseline"),
    [
        (2, 2, 3, 1, 3, "leave_one_out"),
        (2, 2, 2, 3, 2, "leave_one_out"),
        (1, 2, 3, 3, 1, None),
        (2, 3, 2, 1, 2, "leave_one_out"),
    ],
)
@pytest.mark.parametrize(
    ("off_policy", "beta"), [("none", None), ("none", BETA), ("prefix", None), ("sequence", BETA)]
)
def test_unbiased_over_all_batches(
    contexts, vocab, length, groups, group_size, baseline, size, off_policy, beta
):
    """With a table of any size and with coefficients of other prompts and of earlier completions."""
    case = Case.random(contexts, vocab, length, seed=3)
    object.__setattr__(case, "token_values", size * case.token_values)
    estimator = RaoBlackwellTokenValues(baseline=baseline, off_policy=off_policy)
    rows = torch.randint(len(case.rewards), (12,), generator=torch.Generator().manual_seed(0))
    drawn = rows_of(case.stats(case.behaviour.logits), rows), case.sequences[1][rows], case.rewards[rows]
    earlier = estimator.fitted_weights(None, *drawn, beta=BETA, group_size=group_size)[1]
    earlier = earlier._replace(target=20 * earlier.target)  # any coefficients will do
    gradient, weights = expected_batch_gradient(
        case, estimator, groups, group_size, beta=beta, off_policy=off_policy != "none", earlier=earlier
    )
    assert weights.value.abs().max() > 0.01, "the coefficient must be at work"
    torch.testing.assert_close(gradient, exact_gradient(case, beta), rtol=0, atol=1e-10)


@pytest.mark.parametrize("off_policy", ["none", "clip", "token", "prefix", "sequence"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(RaoBlackwellTokenValues, {}), (RaoBlackwellTokenValues, {"discount": 0.7}), (TiltedRaoBlackwell, {})],
)
def test_without_token_values_it_is_rao_blackwell(kind, options, off_policy):
    stats, mask, rewards = rollout(token_values=False)
    behaviour = stats.logprobs - 0.1
    losses = [
        estimator(off_policy=off_policy, allow_biased=True, **options).objective(
            stats.map(Tensor.requires_grad_),
            mask,
            rewards,
            beta=BETA,
            group_size=GROUP,
            behaviour_logprobs=behaviour,
        )
        for estimator in (kind, RaoBlackwell)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("discount", [1.0, 0.6])
def test_the_table_is_the_regression_of_the_kl_to_come_on_the_token_before_it(discount):
    vocabulary, count, length, ridge = 5, 30, 6, 2.0
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    mask = torch.arange(length) < torch.randint(1, length + 1, (count, 1), generator=generator)
    kl = torch.rand(count, length, generator=generator) + torch.nn.functional.pad(tokens[:, :-1] == 2, (1, 0))
    rows, targets = [], []
    for group in range(0, count, GROUP):
        for t in range(length):
            members = range(group, group + GROUP)
            features = torch.stack([one_hot(tokens[i, t], vocabulary) * mask[i, t] for i in members]).double()
            to_come = torch.stack(
                [
                    sum(
                        (discount ** (s - t) * kl[i, s] * mask[i, s] for s in range(t + 1, length)),
                        torch.zeros(()),
                    )
                    for i in members
                ]
            ).double()
            rows.append(features - features.mean(0))
            targets.append(to_come - to_come.mean())
    counts, values = torch.cat(rows), torch.cat(targets)
    expected = torch.linalg.solve(
        counts.T @ counts + ridge * torch.eye(vocabulary).double(), counts.T @ values
    )
    fitted = TokenValues(window=10_000, ridges=(ridge,), iterations=30)
    junk_tokens, junk_kl = torch.where(mask, tokens, 10**6), torch.where(mask, kl, torch.nan)
    fitted.observe_to_come(junk_tokens, mask, junk_kl, GROUP, discount)
    fitted.fit(vocabulary)
    torch.testing.assert_close(fitted.table, expected.float(), rtol=1e-4, atol=1e-5)
    assert fitted.table.argmax() == 2
