"""Total variance of the whole gradient against `MonteCarlo`, on enumerable models and fixed draws.

The gradients are exact and the seeds of the batches fixed, so the tests are deterministic.
"""

import pytest
import torch
from walk import Walk, worlds

from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate, TiltedRaoBlackwell
from lit_klrb.functional.enumeration import TabularLM

WORLDS = {name: (reference, rewards) for name, reference, rewards in worlds()}
PROMPTS, BATCHES = 16, 60


def variances(name, reward, group_size, kinds, table=None):
    """Variance of each estimator, at a policy one step from the reference towards the reward of the world."""
    reference, smooth = WORLDS[name]
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(smooth.shape, dtype=torch.float64, generator=generator)
    tokens, mask = reference.sequences()
    predicted = 0 * noise if table is None else (table[tokens] * mask).sum(1)
    rewards = {
        "smooth": smooth,
        "noise": noise,
        "constant": torch.ones_like(noise),
        "binary": (noise > 1).double(),
        "length": mask.sum(1).double(),
        "adversarial": -(smooth - 0.3).abs(),
        "table": predicted / predicted.std() + 0.2 * noise,
    }[reward]
    shift = torch.randn(reference.logits.shape, dtype=torch.float64, generator=generator)
    policy = TabularLM(reference.logits + 0.3 * shift, reference.max_length)
    walk = Walk(policy, reference, rewards, table)
    probabilities = policy.logprobs(walk.tokens, walk.mask).exp()
    drawn = torch.multinomial(
        probabilities, BATCHES * PROMPTS * group_size, replacement=True, generator=generator
    )
    return [walk.total_variance(kind(), drawn.view(BATCHES, -1), group_size).item() for kind in kinds]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reward", ["noise", "constant", "binary", "length", "adversarial"])
@pytest.mark.parametrize(("name", "group_size"), [("tree", 2), ("markov", 4), ("wide", 8)])
def test_an_unrelated_table_adds_no_variance(name, group_size, reward):
    """The table is unrelated to the reward."""
    table = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, plain = variances(name, reward, group_size, (RaoBlackwellControlVariate, MonteCarlo), table)
    assert ours < 1.05 * plain


@pytest.mark.parametrize(("name", "group_size"), [("wide", 2), ("markov", 4)])
def test_a_table_that_explains_most_of_the_reward_removes_most_of_the_variance(name, group_size):
    table = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kinds = (RaoBlackwellControlVariate, TiltedRaoBlackwell, RaoBlackwell, MonteCarlo)
    ours, tilted, plain, monte_carlo = variances(name, "table", group_size, kinds, table)
    assert ours < 0.25 * monte_carlo
    assert tilted < 0.25 * plain
