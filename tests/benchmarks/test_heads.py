"""The table of heads: its exact gradients by enumeration, and the page that quotes it."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from benchmarks import heads
from lit_klrb.estimators import CoarsenedTopK, RaoBlackwellTopK
from lit_klrb.functional import token_stats

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", [CoarsenedTopK, RaoBlackwellTopK])
def test_the_gradient_by_recursion_is_that_of_all_completions(kind, discount):
    world = heads.World.random(1.0, vocabulary=4, rank=2, length=3)
    tokens = torch.tensor(list(itertools.product(range(4), repeat=3)))
    before = torch.cat([torch.zeros(64, 1, dtype=torch.long), tokens[:, :-1]], 1)
    leaf = world.logits[before].detach().requires_grad_()
    estimator = kind(k=2, support="reference", discount=discount, baseline=None, allow_biased=True)
    stats = token_stats(leaf, world.teacher[before], tokens, topk=estimator.topk)
    loss = estimator.surrogate(stats, torch.ones_like(tokens, dtype=torch.bool))
    (of_logits,) = torch.autograd.grad(len(tokens) * loss, leaf)
    each = world.gradients(of_logits, before, 1)
    first = torch.zeros(4, 1, dtype=torch.long)
    every = token_stats(world.logits[:, None], world.teacher[:, None], first, topk=estimator.topk)
    expected = heads.expected_gradient(world, heads.expected_values(estimator, every), discount)
    found = stats.logprobs.detach().sum(1).exp() @ each
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_page_quotes_the_table():
    """Its rows are those of k = 64, the errors those with 16 and 256 completions."""

    def cells(name):
        lines = (ROOT / name).read_text("utf-8").splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]

    measured = {(row[0].removesuffix(", 64"), row[1]): row for row in cells("replication/evidence/topk.md")}
    quoted = [
        row for row in cells("docs/distillation.md") if len(row) == 6 and row[1] in heads.DISCOUNTS.values()
    ]
    assert len(quoted) == 6
    for label, credit, *errors in quoted:
        row = measured[label, credit]
        assert errors == [row[3], row[5], row[7], row[9]], label
    assert re.search(r"heads\.svg", (ROOT / "docs" / "distillation.md").read_text("utf-8"))
