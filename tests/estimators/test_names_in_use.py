"""KL losses of other software against this package's estimators, completion by completion."""

from itertools import combinations

import pytest
import torch
from enumerated import Case

from replication.names_in_use import NAMES_IN_USE

CASE = Case.random(contexts=3, vocab_size=3, max_length=4, seed=5)
TOLERANCE = 1e-12


def per_completion(loss_of, off_policy):
    """The gradient in the logits of the loss of every completion, [completions, contexts * V]."""
    tokens, mask = CASE.sequences
    leaf = CASE.policy.logits.clone().requires_grad_()
    stats = CASE.stats(leaf)
    behaviour = CASE.stats(CASE.behaviour.logits).logprobs if off_policy else stats.logprobs.detach()
    rows = []
    for n in range(len(tokens)):
        row = slice(n, n + 1)
        part = stats.map(lambda field, row=row: field[row])
        loss = loss_of(part, mask[row], behaviour[row])
        rows.append(torch.autograd.grad(loss, leaf, retain_graph=True)[0].flatten())
    return torch.stack(rows)


def theirs(entry):
    """Their loss, from the log-probabilities alone."""
    return lambda stats, mask, old: entry.loss(stats.logprobs, stats.ref_logprobs, old)[mask].sum()


def ours(entry):
    estimator = entry.estimator(off_policy=entry.off_policy, baseline=None, allow_biased=True)
    return lambda stats, mask, old: estimator.surrogate(stats, mask, behaviour_logprobs=old)


def definition(coefficient):
    """sum_t coefficient(r_t, ratio_t) grad log p(y_t), written down without either."""

    def loss(stats, mask, old):
        p, q, old = stats.logprobs[mask], stats.ref_logprobs[mask], old[mask]
        return (coefficient(p - q, (p - old).exp()).detach() * p).sum()

    return loss


FOUR = {
    "K1Loss": definition(lambda r, ratio: torch.ones_like(r)),
    "K2Loss": definition(lambda r, ratio: r),
    "K2Loss(off_policy='token')": definition(lambda r, ratio: ratio * r),
    "K3Loss": definition(lambda r, ratio: 1 - (-r).exp()),
}


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("entry", NAMES_IN_USE, ids=lambda entry: entry.name)
def test_every_completion_has_the_gradient_of_the_estimator_that_is_named(entry, off_policy):
    gradient = per_completion(theirs(entry), off_policy)
    for other in (ours(entry), FOUR[entry.equals]):
        assert (gradient - per_completion(other, off_policy)).abs().max() < TOLERANCE


def test_eleven_names_have_four_gradients_of_which_two_are_equal_on_policy():
    assert len({entry.name for entry in NAMES_IN_USE}) == 11
    assert {entry.equals for entry in NAMES_IN_USE} == set(FOUR)
    for off_policy in (False, True):
        found = {name: per_completion(loss, off_policy) for name, loss in FOUR.items()}
        equal = {
            frozenset(pair)
            for pair in combinations(found, 2)
            if (found[pair[0]] - found[pair[1]]).abs().max() < 1e-3
        }
        assert equal == (set() if off_policy else {frozenset({"K2Loss", "K2Loss(off_policy='token')"})})
