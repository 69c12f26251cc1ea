"""The baseline of James and Stein against a plain loop over completions."""

import pytest
import torch

from replication.rivals import james_stein_baseline


@pytest.mark.parametrize(("prompts", "count"), [(1, 3), (2, 2), (5, 4)])
def test_the_baseline_is_that_of_a_loop(prompts, count):
    values = torch.randn(prompts * count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups, expected = values.view(prompts, count).tolist(), []
    for p, group in enumerate(groups):
        others = torch.tensor([other for o, other in enumerate(groups) if o != p], dtype=torch.float64)
        for k in range(count):
            left_out = (sum(group) - group[k]) / (count - 1)
            if prompts == 1:
                expected.append(left_out)
                continue
            v = (others.var(1) / count).mean()
            s = (others.mean(1) - others.mean()).square().mean()
            shrink = v / (v + s)
            expected.append(((1 - shrink) * left_out + shrink * others.mean()).item())
    assert james_stein_baseline(values, count).tolist() == pytest.approx(expected, abs=1e-12)


def test_prompts_with_equal_rewards_shrink_nothing():
    values = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    assert james_stein_baseline(values, 2)[:2].tolist() == [1.0, 0.0]
