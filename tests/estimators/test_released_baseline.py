"""Baselines of other prompts, by enumeration of batches of two prompts.

They do not depend on the own completion, so without clipping they are unbiased; that of the released code
costs variance.
"""

import pytest
import torch
from enumerated import Case, exact_gradient, rows_of

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import LossWeights, MonteCarlo, ReleasedMonteCarlo, ReleasedRaoBlackwell
from replication.released import OtherPromptsMonteCarlo, OtherPromptsRaoBlackwell, other_prompts_baseline
from replication.rivals import JamesSteinMonteCarlo

KINDS = [(ReleasedMonteCarlo, OtherPromptsMonteCarlo), (ReleasedRaoBlackwell, OtherPromptsRaoBlackwell)]
BETA = 0.4
CASE = Case.random(contexts=2, vocab_size=2, max_length=2, seed=3)
# The rewards of two prompts: the second has larger ones, and others
REWARDS = torch.stack([CASE.rewards, 3 + CASE.rewards.flip(0)])


def batch_gradients(estimator, off_policy):
    """Gradients of all batches of two prompts with two completions, [N, parameters], and their chances."""
    mask = CASE.sequences[1]
    logits = CASE.policy.logits.clone().requires_grad_()
    current, old = CASE.stats(logits), CASE.stats(CASE.behaviour.logits)
    drawn = old if off_policy else current.detach()
    batches = torch.cartesian_prod(*[torch.arange(len(mask))] * 4)
    rewards = REWARDS[torch.tensor([0, 0, 1, 1]), batches]
    weights = [
        estimator.weights(rows_of(drawn, rows), mask[rows], reward, beta=BETA, group_size=2)
        for rows, reward in zip(batches, rewards, strict=True)
    ]
    rows = batches.flatten()
    leaf = current.map(lambda field: field[rows].detach().requires_grad_())
    behaviour = old.logprobs[rows].detach() if off_policy else None
    joined = LossWeights(torch.cat([w.score for w in weights]), torch.cat([w.kl for w in weights]))
    estimator.loss(leaf, mask[rows], joined, beta=BETA, behaviour_logprobs=behaviour).backward()
    total = torch.zeros(len(batches), logits.numel(), dtype=torch.float64)
    for name in ("logprobs", "kl"):
        gradient = getattr(leaf, name).grad
        if gradient is None:
            continue
        slopes = torch.stack(
            [
                torch.autograd.grad(value, logits, retain_graph=True)[0].flatten()
                for value in getattr(current, name).flatten()
            ]
        ).view(*mask.shape, -1)
        per_row = torch.einsum("nt,ntp->np", gradient, slopes[rows])
        total += len(batches) * per_row.view(len(batches), 4, -1).sum(1)
    chances = torch.where(mask, drawn.logprobs.detach(), 0).sum(-1)[batches].sum(-1).exp()
    return total, chances


def bias_and_variance(estimator, off_policy=False):
    gradients, chances = batch_gradients(estimator, off_policy)
    mean = chances @ gradients
    truth = torch.zeros_like(CASE.policy.logits)
    for rewards in REWARDS:
        case = Case(CASE.policy, CASE.reference, CASE.behaviour, rewards)
        truth = truth + exact_gradient(case, BETA) / len(REWARDS)
    return mean - truth.flatten(), (chances @ (gradients - mean).square()).sum().item()


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(
    ("mode", "off_policy"),
    [("none", False), ("clip", False), ("token", False), ("prefix", True), ("sequence", True)],
)
def test_it_is_unbiased_without_clipping_but_noisier(kinds, mode, off_policy):
    same, other = (bias_and_variance(kind(off_policy=mode), off_policy) for kind in kinds)
    assert same[0].abs().max() < 1e-10
    assert other[0].abs().max() < 1e-10
    assert other[1] > 2 * same[1]


def test_the_baseline_of_james_and_stein_is_unbiased():
    usual, shrunk = map(bias_and_variance, (MonteCarlo(), JamesSteinMonteCarlo()))
    assert shrunk[0].abs().max() < 1e-10
    assert shrunk[1] != pytest.approx(usual[1], rel=0.1)


@pytest.mark.parametrize("kinds", KINDS)
def test_clipping_is_biased_with_either_baseline(kinds):
    same, other = (bias_and_variance(kind(off_policy="clip"), True)[0].norm() for kind in kinds)
    assert same > 0.01
    assert other > 0.01
    assert abs(same - other) > 0.01


@pytest.mark.parametrize(("prompts", "group_size"), [(2, 2), (8, 2), (6, 3), (3, 3)])
def test_the_pairs_are_those_of_the_released_code(prompts, group_size):
    values = torch.randn(prompts * group_size, 4, generator=torch.Generator().manual_seed(0))
    by_prompt = values.view(prompts, group_size, 4)
    expected = torch.empty_like(by_prompt)
    for index in range(group_size):  # a micro-batch holds one completion of each prompt
        micro_batch = by_prompt[:, index].reshape(group_size, -1, 4)  # its reshape(k, -1)
        baseline = (micro_batch.sum(0) - micro_batch) / (group_size - 1)
        expected[:, index] = baseline.flatten(0, 1)
    torch.testing.assert_close(other_prompts_baseline(values, group_size), expected.flatten(0, 1))


def test_what_has_no_such_pairs_is_refused():
    with pytest.raises(ConfigurationError, match=r"must divide the number of prompts .*, 3, got 2"):
        other_prompts_baseline(torch.zeros(6), 2)
