"""Parts of a rollout: what is averaged over them is that of the whole."""

import torch

from lit_klrb.estimators import LossWeights
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.step import Experience


def test_the_token_means_of_equal_parts_average_to_that_of_all_tokens():
    """Not the mean of the parts' own means, which weights a token by how few its part has."""
    lengths = torch.tensor([1, 2, 5, 4, 1, 1])
    mask = torch.arange(5) < lengths[:, None]
    tokens = torch.zeros(6, 5, dtype=torch.long)
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).masked_fill(~mask, torch.nan)
    weights = LossWeights(values, values)
    metrics = {"length": lengths.float().mean().item()}
    whole = Experience(Rollout(tokens, mask, mask), values, values, values[:, 0], weights, None, metrics)
    parts = [whole.part(index, 3) for index in range(3)]
    means = [part.token_mean(part.weights.score) for part in parts]
    torch.testing.assert_close(torch.stack(means).mean(), values[mask].mean())
    assert (
        abs(torch.stack([p.weights.score[p.rollout.mask].mean() for p in parts]).mean() - values[mask].mean())
        > 0.01
    )
