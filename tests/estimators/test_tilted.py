"""`TiltedRaoBlackwell` against its formula, as expectations do not show superfluous zero-mean terms."""

import dataclasses

import pytest
import torch
from enumerated import Case

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwell, TiltedRaoBlackwell
from lit_klrb.estimators.tilted import TOKEN_VALUE_DIFFERENCE

CASE = Case.random(contexts=2, vocab_size=3, max_length=4, seed=5)
ROWS = torch.tensor([0, 7, 19, 30, 12, 4])
BETA, GROUP = 0.3, 3


def rollout(token_values=True):
    stats = CASE.stats(CASE.policy.logits).map(lambda field: field[ROWS])
    if not token_values:
        stats = stats._replace(value=None, expected_value=None)
    return stats, CASE.sequences[1][ROWS], CASE.rewards[ROWS]


def plain_weight(stats, rewards, lengths, row, t, baseline):
    """c_t = -[R - LOO(R)] - [G_t - LOO_t(G)], R = r - sum_t a(y_t), G_t = sum_{s>t} (E_s[a] - beta KL_s)."""

    def rest(i):
        return rewards[i] - sum(stats.value[i, s] for s in range(lengths[i]))

    def to_come(i):
        return sum(stats.expected_value[i, s] - BETA * stats.kl[i, s] for s in range(t + 1, lengths[i]))

    first = row // GROUP * GROUP
    others = [i for i in range(first, first + GROUP) if i != row] if baseline else []
    share = 1 / max(len(others), 1)
    return sum(share * (of(i)) for of in (rest, to_come) for i in others) - rest(row) - to_come(row)


@pytest.mark.parametrize("baseline", [None, "leave_one_out"])
def test_score_weights_are_the_formula(baseline):
    stats, mask, rewards = rollout()
    junk = stats.map(lambda field: torch.where(mask, field, torch.nan))
    weights = TiltedRaoBlackwell(baseline=baseline).weights(junk, mask, rewards, beta=BETA, group_size=GROUP)
    lengths = mask.sum(1).tolist()
    for row, length in enumerate(lengths):
        plain = [plain_weight(stats, rewards, lengths, row, t, baseline) for t in range(length)]
        torch.testing.assert_close(weights.score[row, :length], torch.stack(plain), rtol=0, atol=1e-12)
        assert not weights.score[row, length:].any()
    assert torch.equal(weights.kl, BETA * mask.double())
    assert torch.equal(weights.value, -mask.double())


def test_it_is_rao_blackwell_under_the_tilted_reference():
    """Up to terms common to the completions of a prompt, q is replaced by q exp(a / beta)."""
    stats, mask, rewards = rollout()
    tilted = TiltedRaoBlackwell(baseline=None).weights(stats, mask, rewards, beta=BETA, group_size=GROUP)
    moved = stats._replace(
        kl=stats.kl - stats.expected_value / BETA, ref_logprobs=stats.ref_logprobs + stats.value / BETA
    )
    left = rewards - torch.where(mask, stats.value, 0).sum(1)
    plain = RaoBlackwell(baseline=None).weights(moved, mask, left, beta=BETA, group_size=GROUP)
    torch.testing.assert_close(tilted.score, plain.score, rtol=0, atol=1e-12)


def trajectory_wise(logits, row):
    """The gradient of E[r] with the control variate of arXiv:1908.03263 (its equation for all later steps),
    sampled by one completion: Q(y_<t, v) = sum_{s<t} a(y_s) + a(v)."""
    (tokens, mask), a = CASE.sequences, CASE.token_values
    length = int(mask[row].sum())
    logprobs = dataclasses.replace(CASE.policy, logits=logits).token_logits(tokens).log_softmax(-1)[row]
    taken = tokens[row, :length]
    of_actions = [a[taken[:t]].sum() + a for t in range(length)]
    chosen = [q[token] for q, token in zip(of_actions, taken, strict=True)]
    values = [(logprobs[t].exp() * q).sum() for t, q in enumerate(of_actions)]
    scores = []
    for t in range(length):
        later = sum(chosen[s] - values[s].detach() for s in range(t + 1, length))
        scores.append((CASE.rewards[row] - chosen[t] - later) * logprobs[t, taken[t]])
    return sum(scores) + sum(values)


def test_without_a_baseline_it_is_the_trajectory_wise_control_variate():
    """Completion by completion, beside the Rao-Blackwell gradient of the KL."""
    leaf = CASE.policy.logits.clone().requires_grad_()
    for row in range(len(CASE.sequences[0])):
        stats = CASE.stats(leaf).map(lambda field, row=row: field[row : row + 1])
        mask, rewards = CASE.sequences[1][row : row + 1], CASE.rewards[row : row + 1]
        tilted = TiltedRaoBlackwell(baseline=None).objective(stats, mask, rewards, beta=BETA, group_size=1)
        kl = RaoBlackwell(baseline=None).surrogate(stats, mask)
        known = BETA * kl - trajectory_wise(leaf, row)
        (ours,), (theirs,) = (torch.autograd.grad(one, leaf, retain_graph=True) for one in (tilted, known))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_recipe_of_token_values_needs_them():
    stats, mask, _ = rollout(token_values=False)
    with pytest.raises(ConfigurationError, match=r"stats.expected_value is None"):
        TiltedRaoBlackwell(off_policy="prefix").loss(
            stats, mask, TiltedRaoBlackwell().weights(*rollout(), beta=BETA, group_size=GROUP), beta=BETA
        )
    assert TOKEN_VALUE_DIFFERENCE.formula == "c_t = sum_{s>t} E_s[a] - sum_s a(y_s), l_t = E_t[a]"
