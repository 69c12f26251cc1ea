"""Estimates of the KL on enumerated models: their values, and the coverage of their intervals."""

import math

import pytest
import torch
from scipy import stats as scipy_stats

from lit_klrb.comparison.estimates import (
    EXACT,
    K1,
    K3,
    LIKELIHOOD,
    RB,
    TokenTable,
    skewed_interval,
)
from lit_klrb.functional import token_stats
from lit_klrb.functional.enumeration import TabularLM, exact_kl, num_prefixes

PAIRS, VOCABULARY, LENGTH = 12, 3, 4
REPLICATES, PROMPTS, COMPLETIONS, LEVEL = 600, 24, 4, 0.95


class Population:
    """Prompts with different KLs: each is a pair of enumerated models."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        shape = num_prefixes(VOCABULARY, LENGTH), VOCABULARY
        tables, self.kls, self.lengths, self.probabilities = [], [], [], []
        for index in range(PAIRS):
            logits = torch.randn(shape, generator=generator, dtype=torch.float64)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            policy, reference = (TabularLM(x, LENGTH) for x in (logits, logits + 0.15 * (index + 1) * noise))
            tokens, mask = policy.sequences()
            chances = policy.logprobs(tokens, mask).exp()
            pair = policy.token_logits(tokens), reference.token_logits(tokens)
            tables.append(token_stats(*pair, tokens).masked(mask))
            self.kls.append(exact_kl(policy, reference).item())
            self.lengths.append((chances @ mask.sum(1).double()).item())
            self.probabilities.append(chances)
        self.mask = mask
        self.stats = type(tables[0])(
            *(None if f[0] is None else torch.stack(f) for f in zip(*tables, strict=True))
        )
        self.kl = sum(self.kls) / PAIRS
        self.kl_per_token = sum(self.kls) / sum(self.lengths)

    def sample(self, generator, prompts=PROMPTS):
        """A table of completions of prompts, both drawn at random."""
        pair = torch.randint(PAIRS, (prompts,), generator=generator)
        chances = torch.stack(self.probabilities)[pair]
        chosen = torch.multinomial(chances, COMPLETIONS, replacement=True, generator=generator)
        rows, chosen = pair.repeat_interleave(COMPLETIONS), chosen.flatten()
        stats = self.stats.map(lambda field: field[rows, chosen])
        cluster = torch.arange(prompts).repeat_interleave(COMPLETIONS)
        return TokenTable(stats, self.mask[chosen], cluster, COMPLETIONS)


@pytest.fixture(scope="module")
def population():
    return Population()


@pytest.fixture(scope="module")
def replicates(population):
    generator = torch.Generator().manual_seed(1)
    return [population.sample(generator) for _ in range(REPLICATES)]


@pytest.fixture(scope="module")
def estimates(replicates):
    return [table.estimates(LEVEL) for table in replicates]


def coverage(intervals, truth):
    return sum(low <= truth <= high for low, high in intervals) / len(intervals)


# The standard error of a coverage of 0.95 among 600 replicates is 0.009
@pytest.mark.parametrize("name", [RB, K1, K3])
def test_intervals_cover_the_exact_kl(population, estimates, name):
    for unit, truth in (("sequence", population.kl), ("token", population.kl_per_token)):
        found = [e[name][unit] for e in estimates]
        assert 0.925 <= coverage([(e.low, e.high) for e in found], truth) <= 0.975, unit
        values = torch.tensor([e.value for e in found], dtype=torch.float64)
        error = values.std() / len(values) ** 0.5
        assert abs(values.mean() - truth) < 4 * error, unit
        # The standard error is that of the estimates from one replicate to the next
        mean_error = sum(e.error for e in found) / len(found)
        assert mean_error == pytest.approx(values.std().item(), rel=0.15)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_interval_inverts_halls_transformation(sign):
    influences = sign * torch.tensor([-0.5] * 18 + [1.0, 8.0], dtype=torch.float64)
    count, skewness = 20, scipy_stats.skew(influences.numpy(), bias=False)
    low, high = skewed_interval(influences, 0.9)
    for end, quantile in ((low, 0.95), (high, 0.05)):
        t = -end
        h = t + skewness * (2 * t**2 + 1) / (6 * math.sqrt(count)) + skewness**2 * t**3 / (27 * count)
        assert h == pytest.approx(scipy_stats.t.ppf(quantile, count - 1))
    assert sign * (high + low) > 0  # longer on the side of the rare large values


def test_a_ratio_has_the_error_of_the_jackknife(population):
    table = population.sample(torch.Generator().manual_seed(4), prompts=60)
    estimate = table.estimates(LEVEL)[RB]["token"]
    kl, counts = table.per_cluster(table.stats.kl.sum(1)), table.per_cluster(table.mask.sum(1))
    left_out = (kl.sum() - kl) / (counts.sum() - counts)
    jackknife = ((len(kl) - 1) / len(kl) * (left_out - left_out.mean()).square().sum()).sqrt()
    assert estimate.value == pytest.approx((kl.sum() / counts.sum()).item())
    assert estimate.error == pytest.approx(jackknife.item(), rel=0.02)


def test_given_texts_have_no_estimates_that_need_samples(population):
    sampled = population.sample(torch.Generator().manual_seed(5))
    # Windows of three texts
    cluster = torch.arange(len(sampled.mask)) * 3 // len(sampled.mask)
    given = TokenTable(sampled.stats, sampled.mask, cluster, None)
    estimates = given.estimates(LEVEL)
    assert set(estimates) == {EXACT, LIKELIHOOD}
    per_text = [sampled.stats.kl[cluster == text].sum().item() for text in range(3)]
    assert estimates[EXACT]["sequence"].value == pytest.approx(sum(per_text) / 3)
    assert estimates[EXACT]["sequence"].error == pytest.approx(scipy_stats.sem(per_text))


def test_one_prompt_has_no_interval(population):
    table = population.sample(torch.Generator().manual_seed(6), prompts=1)
    numbers = table.estimates(LEVEL)[RB]["sequence"].numbers()
    assert numbers["estimate"] is not None
    assert numbers["se"] is numbers["low"] is numbers["high"] is None
