import torch

from lit_klrb.models.generation import Rollout
from lit_klrb.modules.dpo import best_and_worst


def test_pairs_are_the_best_against_the_worst_and_ties_give_none():
    tokens = torch.tensor(
        [[9, 1, 5, 0], [9, 1, 6, 7], [9, 1, 0, 0], [8, 2, 3, 0], [8, 2, 4, 0], [8, 2, 3, 4]]
    )
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]).bool()
    rollout = Rollout(tokens, torch.cat([torch.ones(6, 2).bool(), mask], 1), mask)
    pairs = best_and_worst(
        [[9, 1], [8, 2]], rollout, torch.tensor([0.5, 2.0, -1.0, 3.0, 3.0, 3.0]), torch.arange(6.0)
    )
    assert pairs == [([9, 1], [6, 7], [0], 1.0, 2.0)]
