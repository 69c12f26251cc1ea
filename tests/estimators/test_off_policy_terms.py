"""Importance weights of each term against plain loops: expectations are the same for w_<t and w_<=t."""

import math

import pytest
import torch
from enumerated import Case

from lit_klrb import estimators

CASE = Case.random(contexts=2, vocab_size=3, max_length=4, seed=7)
ROWS = torch.tensor([0, 5, 20, 11, 3, 29])
BETA, GROUP_SIZE = 0.4, 3


def k3(r):
    return r + math.exp(-r) - 1


# Summands of c_t as (value, sign, positions s credited to t), and l_t; in terms of r and k at one position.
R, K = (lambda r, k: r), (lambda r, k: k)
EVERYWHERE, FROM_HERE, AFTER, OWN = (
    lambda s, t: True,
    lambda s, t: s >= t,
    lambda s, t: s > t,
    lambda s, t: s == t,
)
TERMS = {
    "MonteCarlo": ([(R, 1, EVERYWHERE)], None),
    "MonteCarloRewardToGo": ([(R, 1, FROM_HERE)], None),
    "RaoBlackwell": ([(K, 1, AFTER)], K),
    "RaoBlackwellSequence": ([(K, 1, EVERYWHERE)], K),
    "RaoBlackwellLite": ([(R, 1, OWN), (K, -1, OWN), (K, 1, AFTER)], None),
    "RaoBlackwellReward": ([(K, 1, EVERYWHERE)], None),
    "RaoBlackwellLoss": ([], K),
    "K3Reward": ([(lambda r, k: k3(r), 1, EVERYWHERE)], None),
    "NoKL": ([], None),
}


def product(ratios, stop):
    return math.prod(ratios[:stop])


def weight_of(off_policy, ratios, last):
    """The importance weight of a term that depends on the tokens up to position `last`, inclusive."""
    return product(ratios, last + 1 if off_policy == "prefix" else len(ratios))


def plain_coefficients(name, off_policy, new, old, mask):
    """Coefficients of log p(y_t) and KL_t in the loss times B, by the definition of each correction."""
    summands, pathwise = TERMS[name]
    rows, width = mask.shape
    score, kl = torch.zeros(rows, width).double(), torch.zeros(rows, width).double()
    for row, length in enumerate(mask.sum(1).tolist()):
        ratios = (new.logprobs - old.logprobs)[row, :length].exp().tolist()
        r = (new.logprobs - new.ref_logprobs)[row].tolist()
        k = new.kl[row].tolist()
        for t in range(length):
            for value, sign, credited in summands:
                for s in range(length):
                    if not credited(s, t):
                        continue
                    known = s - 1 if value is K else s  # KL_s is known before token s is drawn
                    if off_policy == "token":
                        weight = ratios[t]
                    else:
                        weight = weight_of(off_policy, ratios, max(t, known))
                    score[row, t] += BETA * weight * sign * value(r[s], k[s])
            whole = ratios[t] if off_policy == "token" else product(ratios, length)
            score[row, t] += whole * coupled(name, old, mask, row, t)
            if pathwise is K:
                kl[row, t] = BETA * (1 if off_policy == "token" else weight_of(off_policy, ratios, t - 1))
    return score, kl


def coupled(name, old, mask, row, t):
    """The terms of other completions of the prompt and of rewards, under the policy that generated."""
    summands, _ = TERMS[name]
    others = [other for other in range(row // 3 * 3, row // 3 * 3 + 3) if other != row]
    rewards = CASE.rewards[ROWS]
    total = -(rewards[row] - rewards[others].mean())
    for other in others:
        length = int(mask[other].sum())
        r, k = (old.logprobs - old.ref_logprobs)[other].tolist(), old.kl[other].tolist()
        for value, sign, credited in summands:
            for s in range(length):
                # After the end of a completion only what every position is credited with remains.
                if credited(s, t) and (t < length or credited is EVERYWHERE):
                    total = total - BETA * sign * value(r[s], k[s]) / len(others)
    return total


@pytest.mark.parametrize("off_policy", ["token", "prefix", "sequence"])
@pytest.mark.parametrize("name", TERMS)
def test_every_term_has_its_own_importance_weight(name, off_policy):
    mask = CASE.sequences[1][ROWS]
    new, old = (
        CASE.stats(model.logits).map(lambda field: field[ROWS].detach())
        for model in (CASE.policy, CASE.behaviour)
    )
    estimator = getattr(estimators, name)(off_policy=off_policy)
    weights = estimator.weights(old, mask, CASE.rewards[ROWS], beta=BETA, group_size=GROUP_SIZE)
    leaf = new.map(lambda field: field.clone().requires_grad_())
    loss = estimator.loss(leaf, mask, weights, beta=BETA, behaviour_logprobs=old.logprobs)
    gradients = torch.autograd.grad(loss, (leaf.logprobs, leaf.kl), materialize_grads=True)
    expected = plain_coefficients(name, off_policy, new, old, mask)
    for gradient, plain in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient * len(ROWS), plain, rtol=0, atol=1e-12)
