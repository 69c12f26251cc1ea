"""What estimators remember: against the fits written out, and against estimators that remember nothing."""

import pytest
import torch

from lit_klrb import estimators
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import (
    EstimatorMemory,
    RaoBlackwell,
    RaoBlackwellControlVariate,
    TiltedRaoBlackwell,
)
from lit_klrb.estimators.cross_fit import EarlierRollouts
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.functional import token_stats
from replication.to_come import RaoBlackwellTokenValues
from replication.topk_rivals import TopKTruncated

V, T, K, GROUPS, BETA = 13, 5, 3, 4, 0.3
STATEFUL = (TiltedRaoBlackwell, RaoBlackwellTokenValues, RaoBlackwellControlVariate)


class World:
    """A policy and a reference that read the last token, and rewards that are sums over tokens."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.logits, self.reference = torch.randn(2, V, V, generator=generator)
        self.values = torch.randn(V, generator=generator)

    def rollout(self, seed):
        """Tokens, mask and rewards."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.zeros(GROUPS * K, 1, dtype=torch.long)
        for _ in range(T):
            chances = self.logits[tokens[:, -1]].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
        tokens = tokens[:, 1:]
        ends = torch.randint(2, T + 1, (len(tokens), 1), generator=generator)
        mask = torch.arange(T) < ends
        return tokens, mask, (self.values[tokens] * mask).sum(1)

    def stats(self, tokens, table):
        last = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
        logits, reference = self.logits[last].requires_grad_(), self.reference[last]
        return token_stats(logits, reference, tokens, token_values=table)


def step(memory, world, seed):
    """One step in the order of the contract: the weights, with everything that is needed to repeat them."""
    tokens, mask, rewards = world.rollout(seed)
    table = memory.token_values
    stats = world.stats(tokens, table)
    weights = memory.weights(stats, mask, rewards, beta=BETA, group_size=K, tokens=tokens)
    memory.estimator.loss(stats, mask, weights, beta=BETA).backward()
    memory.observe(tokens, mask, rewards, stats, group_size=K)
    return weights, (tokens, mask, rewards, stats.detach()), table


def same(one, other):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [V, None])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_rollout_is_weighted_with_what_was_fitted_to_those_before_it(kind, size):
    world, estimator = World(), kind()
    memory = EstimatorMemory(estimator, vocabulary_size=size)
    to_come = estimator.token_values_predict == "kl_to_come"
    values, sums = TokenValues(predicted=estimator.token_values_predict), EarlierRollouts()
    differs = []
    for seed in range(5):
        weights, (tokens, mask, rewards, stats), table = step(memory, world, seed)
        values.fit(size)
        assert table is values.table is None or torch.equal(table, values.table)
        if kind is TiltedRaoBlackwell:
            expected = estimator.weights(stats, mask, rewards, beta=BETA, group_size=K)
        else:
            rows = stats, mask, rewards
            expected, own = estimator.fitted_weights(sums.sums, *rows, beta=BETA, group_size=K)
            sums.observe(own)
        assert same(weights, expected)
        values.observe_to_come(tokens, mask, stats.kl, K) if to_come else values.observe(
            tokens, mask, rewards, K
        )
        plain = stats._replace(value=None, expected_value=None)
        forgetful = estimator.weights(plain, mask, rewards, beta=BETA, group_size=K)
        differs.append(not torch.equal(weights.score, forgetful.score))
    # While no table has predicted anything, the one in use is zero
    assert differs[0] is False
    assert differs[1] is True
    assert (len(table) == V) or size is None
    ((metric, explained),) = memory.metrics.items()
    assert metric == ("kl_explained" if to_come else "reward_explained")
    assert explained == values.explained
    assert memory.remembers


@pytest.mark.parametrize("name", ["MonteCarlo", "RaoBlackwell", "RaoBlackwellTopK", "NoKL"])
def test_an_estimator_that_remembers_nothing_is_itself(name):
    world, estimator = World(), getattr(estimators, name)()
    memory = EstimatorMemory(estimator)
    for seed in range(2):
        weights, (_, mask, rewards, stats), table = step(memory, world, seed)
        assert table is None
        assert same(weights, estimator.weights(stats, mask, rewards, beta=BETA, group_size=K))
    assert memory.state_dict() == {"progress": 0.0}
    assert memory.metrics == {}
    assert not memory.remembers


def test_unseen_tokens_have_the_value_zero_and_the_table_grows():
    tokens = torch.tensor([[1, 2], [3, 1]]), torch.tensor([[1, 9], [9, 4]])
    memory, sizes = EstimatorMemory(estimators.TiltedRaoBlackwell()), []
    mask, rewards = torch.ones(2, 2, dtype=torch.bool), torch.tensor([0.0, 1.0])
    for rows in tokens:
        logits = torch.zeros(2, 2, 20)
        stats = token_stats(logits, logits, rows, token_values=memory.token_values)
        memory.weights(stats, mask, rewards, beta=BETA, group_size=2, tokens=rows)
        memory.observe(rows, mask, rewards, stats, group_size=2)
        sizes.append(len(memory.token_values))
    assert sizes == [4, 10]
    assert memory.token_values[5:9].eq(0).all()
    whole = EstimatorMemory(estimators.TiltedRaoBlackwell(), vocabulary_size=20)
    for rows in tokens:
        whole.observe(rows, mask, rewards, stats, group_size=2)
    torch.testing.assert_close(whole.token_values[:10], memory.token_values)


@pytest.mark.parametrize("kind", [*STATEFUL, RaoBlackwell])
def test_a_resumed_memory_goes_on_bit_for_bit(kind):
    settings = {"final_discount": 1.0} if kind in (RaoBlackwell, RaoBlackwellTokenValues) else {}
    estimator = kind(**({"discount": 0.2, "allow_biased": True} if settings else {}))
    world, memory = World(), EstimatorMemory(estimator, **settings)
    for seed in range(3):
        memory.progress = seed / 5 if settings else 0.0
        step(memory, world, seed)
    again = EstimatorMemory(estimator, **settings)
    again.load_state_dict(memory.state_dict())
    assert again.estimator == memory.estimator
    fresh, _, _ = step(EstimatorMemory(estimator, **settings), world, 3)
    (expected, *_), (found, *_) = step(memory, world, 3), step(again, world, 3)
    assert same(found, expected)
    assert not torch.equal(found.score, fresh.score)


def test_a_discount_that_increases_to_1_needs_no_allow_biased_and_says_what_is_biased_at_first():
    def line(first, last, **settings):
        return EstimatorMemory(estimators.RaoBlackwell(discount=first, **settings), final_discount=last)

    for unbiased in (line(1.0, None), line(1.0, 1.0)):
        unbiased.check_trainable()
        assert unbiased.passing_bias is None
    passing = line(0.2, 1.0)
    passing.progress = 0.5
    passing.check_trainable()
    assert passing.passing_bias.startswith("the discount increases from 0.2 to 1 over the run: at first")
    with pytest.raises(ConfigurationError, match=r"progress: must be between 0 and 1, got 1\.5"):
        passing.progress = 1.5
    for first, last in ((1.0, 0.5), (0.0, 0.5), (0.5, None)):
        with pytest.raises(ConfigurationError, match=r"with discount 0\.5"):
            line(first, last).check_trainable()
        assert line(first, last, allow_biased=True).passing_bias is None
    with pytest.raises(ConfigurationError, match="off_policy: must not be none with 2 optimizer steps"):
        passing.check_trainable(optimizer_steps=2)
    refused = EstimatorMemory(TopKTruncated(k=1, discount=0.0), final_discount=1.0)
    assert refused.passing_bias is None
    with pytest.raises(ConfigurationError, match="TopKTruncated is refused"):
        refused.check_trainable()


def test_statistics_with_other_token_values_are_refused():
    world, memory = World(), EstimatorMemory(estimators.TiltedRaoBlackwell())
    step(memory, world, 0)
    tokens, mask, rewards = world.rollout(1)
    table = memory.token_values
    for wrong, message in ((None, "got none: the weights would"), (table + 1, "got others")):
        stats = world.stats(tokens, wrong).detach()
        with pytest.raises(ConfigurationError, match=f"stats: must be computed with .*, {message}"):
            memory.weights(stats, mask, rewards, beta=BETA, group_size=K, tokens=tokens)


def test_what_cannot_be_observed_is_refused():
    world, memory = World(), EstimatorMemory(RaoBlackwellTokenValues())
    tokens, mask, rewards = world.rollout(0)
    stats = world.stats(tokens, None).detach()
    with pytest.raises(ConfigurationError, match="group_size: must be at least 2, as token values"):
        memory.observe(tokens, mask, rewards, stats, group_size=1)
    with pytest.raises(ConfigurationError, match=r"stats.kl is None"):
        memory.observe(tokens, mask, rewards, stats._replace(kl=None), group_size=K)
    small = EstimatorMemory(estimators.TiltedRaoBlackwell(), vocabulary_size=3)
    with pytest.raises(ConfigurationError, match="vocabulary_size: must exceed all token ids, got 3 and"):
        small.observe(tokens, mask, rewards, stats, group_size=K)
    with pytest.raises(ConfigurationError, match="prior: MonteCarlo has no token values of rewards"):
        EstimatorMemory(estimators.MonteCarlo()).start_from(torch.zeros(V))
    # Without rewards there is nothing to learn about them
    tilted = EstimatorMemory(estimators.TiltedRaoBlackwell())
    tilted.observe(tokens, mask, None, stats, group_size=K)
    assert tilted.token_values is None


def test_a_state_of_another_estimator_is_refused():
    memory, other = EstimatorMemory(estimators.TiltedRaoBlackwell()), EstimatorMemory(estimators.MonteCarlo())
    with pytest.raises(ConfigurationError, match="ckpt_path: holds no memory of TiltedRaoBlackwell where"):
        memory.load_state_dict(other.state_dict())
