"""Memory, matrix products and compilation of the tiled operations."""

import math
import threading
import warnings

import pytest
import torch
from tiled_cases import (
    assert_close,
    gradients,
    make_case,
    present,
    tiled_loss,
    tiled_stats,
    token_values,
    weights_like,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TopK, tiled_policy_loss, tiled_token_stats
from lit_klrb.functional.tiled import blocks, buffers, head, inputs


class Recorder(TorchDispatchMode):
    """Records the largest tensor that an operation returns, and the size of matrix products."""

    largest = 0
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            self.products += left.numel() * right.shape[1]
        return result


@pytest.mark.parametrize("operation", ["stats", "loss"])
def test_no_tensor_is_as_large_as_the_logits(operation, monkeypatch):
    monkeypatch.setattr(head, "_CPU_BLOCK", 64)
    monkeypatch.setattr(inputs, "_RETAINED_LOGITS", 64 * 401 - 1)
    case = make_case(batch=8, length=8, size=2, vocabulary=401)
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)
    largest = {}
    for tile_size in (4, 64):
        with Recorder() as record:
            options = {"token_values": token_values(case), "tile_size": tile_size}
            if operation == "stats":
                total = sum(field.sum() for field in present(tiled_stats(case, leaves, **options)))
            else:
                total, _ = tiled_loss(case, leaves, mask, weights, weights, value_weights=weights, **options)
            total.backward()
        largest[tile_size] = record.largest
    if operation == "stats":
        assert largest == {64: 64 * 7 * 10, 4: 64 * 7 * 10}  # sums of 7 blocks
    else:
        assert largest == {64: 64 * 401, 4: 4 * 401}  # a tile


def test_number_of_matrix_products(monkeypatch):
    case = make_case()
    hidden, weight, bias = leaves = case.leaves()
    everything, some = case.tokens >= 0, torch.arange(5) < torch.tensor([[2], [0], [1]])
    weights = weights_like(case.tokens)

    def products(run, *arguments) -> float:
        with Recorder() as record:
            run(*arguments)
        return record.products / (case.tokens.numel() * case.weight.numel())

    def loss(leaves, mask):
        tiled_loss(case, leaves, mask, weights, weights)[0].backward()

    def stats(leaves, mask):
        tiled_stats(case, leaves, mask=mask).kl.sum().backward()

    assert products(loss, leaves, everything) == 4
    assert products(stats, leaves, None) == 4
    assert products(loss, (hidden, weight.detach(), bias.detach()), everything) == 3
    assert products(loss, (hidden.detach(), weight, bias.detach()), everything) == 3
    assert products(loss, leaves, some) == pytest.approx(4 * 3 / 15)
    assert products(stats, leaves, some) == pytest.approx(4 * 3 / 15)
    monkeypatch.setattr(inputs, "_RETAINED_LOGITS", 14 * len(case.weight))
    assert products(stats, leaves, None) == 6
    assert products(stats, leaves, some) == pytest.approx(4 * 3 / 15)
    with torch.no_grad():
        assert products(tiled_loss, case, leaves, everything, weights, weights) == 2
        assert products(tiled_stats, case, leaves) == 2


def test_blocks_are_compiled_on_request_only(monkeypatch):
    compiled = []
    monkeypatch.setattr(blocks, "_compiled", lambda body: compiled.append(body) or body)
    case = make_case()
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)

    def run():
        tiled_loss(case, leaves, mask, weights, weights)
        tiled_stats(case, leaves).entropy.sum().backward()

    run()
    monkeypatch.setenv("LIT_KLRB_COMPILE", "0")
    run()
    assert not compiled
    monkeypatch.setenv("LIT_KLRB_COMPILE", "1")
    run()
    assert set(compiled) == {blocks.block_sums, blocks.block_gradient, blocks.block_recomputed_gradient}
    monkeypatch.setenv("LIT_KLRB_COMPILE", "yes")
    with pytest.raises(ConfigurationError, match="LIT_KLRB_COMPILE: must be 0, 1 or auto, got 'yes'"):
        run()


def test_passes_over_a_few_rows_at_a_time_give_the_same(monkeypatch):
    case = make_case()
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)
    results = []
    for elements in (2**20, 3 * len(case.weight)):  # whole tiles; three rows
        monkeypatch.setattr(blocks, "_ELEMENTS_PER_PASS", elements)
        valued = {"token_values": token_values(case)}
        loss, stats = tiled_loss(case, leaves, mask, weights, weights, **valued, value_weights=weights)
        general = tiled_stats(case, leaves, **valued)
        total = (weights * (general.logprobs + general.kl + general.entropy + general.expected_value)).sum()
        results.append(
            [loss, *present(stats), *gradients(loss, leaves), *present(general), *gradients(total, leaves)]
        )
    assert_close(*results)


@pytest.mark.slow
def test_compiled_blocks_give_the_same(monkeypatch):
    case = make_case()
    case.bias[9] = case.ref_bias[9] = -math.inf
    case = case._replace(tokens=case.tokens.masked_fill(case.tokens == 9, 8))
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)
    results = []
    for setting in ("0", "1"):
        monkeypatch.setenv("LIT_KLRB_COMPILE", setting)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of inductor
            valued = {"token_values": token_values(case)}
            options = {**valued, "value_weights": weights, "tile_size": 4}
            loss, stats = tiled_loss(case, leaves, mask, weights, weights, **options)
            general = tiled_stats(case, leaves, temperature=0.7, jsd_weight=0.3, **valued)
            fields = general.logprobs, general.kl, general.entropy, general.expected_value, general.jsd
            total = (weights * sum(fields)).sum()
            results.append(
                [
                    loss,
                    *present(stats),
                    *gradients(loss, leaves),
                    *present(general),
                    *gradients(total, leaves),
                ]
            )
    assert_close(*results)


def test_a_row_of_the_reference_is_never_retained(monkeypatch):
    case = make_case()
    mask, weights = case.tokens >= 0, weights_like(case.tokens)
    for topk, ref_rows in ((None, 23), (TopK(3), 7)):
        monkeypatch.setattr(buffers, "_WORKSPACE", threading.local())
        tiled_loss(case, case.leaves(), mask, weights, weights, topk=topk, tile_size=4)
        sizes = {name: len(memory) for (name, _), memory in buffers._WORKSPACE.buffers.items()}
        assert sizes == {"logits": 4 * 7, "ref_logits": 4 * ref_rows, "masses": 4 * 23}


def test_retained_blocks_are_their_own():
    case, other = make_case(), make_case(seed=2)
    leaves, weights = case.leaves(), weights_like(case.tokens)
    expected = gradients((weights * tiled_stats(case, leaves).kl).sum(), leaves)
    loss = (weights * tiled_stats(case, leaves, tile_size=4).kl).sum()
    tiled_stats(other, other.leaves(), tile_size=4)
    assert_close(gradients(loss, leaves), expected)


def test_calls_that_share_their_memory_do_not_disturb_each_other(monkeypatch):
    """Later calls do not overwrite results: a small call after a large one, training after inference."""
    monkeypatch.setattr(buffers, "_WORKSPACE", threading.local())
    large, small = make_case(vocabulary=41), make_case(batch=1, seed=2)

    def run(case):
        leaves = case.leaves()
        mask, scores = torch.ones_like(case.tokens, dtype=torch.bool), weights_like(case.tokens)
        loss, stats = tiled_policy_loss(
            *leaves[:2], *case[3:5], case.tokens, mask, scores, scores.abs(), bias=leaves[2], ref_bias=case[5]
        )
        loss.backward()
        return [*present(stats), *(leaf.grad for leaf in leaves)]

    with torch.inference_mode():
        tiled_token_stats(*large[:2], *large[3:5], large.tokens)
    first = run(large)
    kept = [tensor.clone() for tensor in first]
    memory = {key: tensor.data_ptr() for key, tensor in buffers._WORKSPACE.buffers.items()}
    expected = run(small)
    assert {key: tensor.data_ptr() for key, tensor in buffers._WORKSPACE.buffers.items()} == memory
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    monkeypatch.setattr(buffers, "_WORKSPACE", threading.local())
    assert all(torch.equal(a, b) for a, b in zip(run(small), expected, strict=True))
