import torch

from lit_klrb.data.samplers import StepBatchSampler
from lit_klrb.seeding import derive_seed, forked_rng


def batches(start=0, count=8, **changes):
    settings = {"size": 7, "batch_size": 3, "seed": 1, **changes}
    sampler = iter(StepBatchSampler(**settings, start=start))
    return [next(sampler) for _ in range(count)]


def test_a_batch_depends_on_seed_and_step_alone():
    whole = batches()
    for start in range(8):
        assert batches(start=start, count=8 - start) == whole[start:]
    assert batches(seed=2) != whole


def test_every_example_is_read_once_an_epoch_across_batch_borders():
    flat = [index for batch in batches(count=14) for index in batch]
    epochs = [flat[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_repeat_serves_each_batch_several_times():
    once = batches(count=3)
    assert batches(count=6, repeat=2) == [batch for batch in once for _ in range(2)]
    assert batches(start=3, count=2, repeat=2) == [once[1], once[2]]


def test_forked_rng_neither_sees_nor_moves_the_surrounding_state():
    torch.manual_seed(0)
    undisturbed = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    with forked_rng(derive_seed(3, "x")):
        inside = torch.rand(2)
    assert torch.equal(torch.cat([first, torch.rand(1)]), undisturbed)
    with forked_rng(derive_seed(3, "y")):
        assert not torch.equal(torch.rand(2), inside)
    torch.manual_seed(99)
    with forked_rng(derive_seed(3, "x")):
        assert torch.equal(torch.rand(2), inside)


def test_addresses_do_not_collide_by_concatenation():
    seeds = {
        derive_seed(0, "a", 11),
        derive_seed(0, "a1", 1),
        derive_seed(0, "a", 1, 1),
        derive_seed(1, "a", 11),
    }
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
