"""Products by oneDNN: which processors have them, and that a linear layer's gradients are right."""

from contextlib import suppress

import pytest
import torch

from lit_klrb.functional import products
from lit_klrb.functional.products import linear, quick_products

AMD, INTEL = "vendor_id : AuthenticAMD\n", "vendor_id : GenuineIntel\n"


@pytest.fixture
def on_processor(tmp_path, monkeypatch):
    """Replace the machine's processor."""

    def describe(text):
        monkeypatch.setattr(products, "CPU_INFO", tmp_path / "cpuinfo")
        products.CPU_INFO.write_text(text)
        products.onednn_is_quicker.cache_clear()

    yield describe
    products.onednn_is_quicker.cache_clear()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (AMD + "flags : avx2 avx512f avx512_bf16", "medium"),
        (AMD + "flags : avx2", "highest"),
        (AMD + "flags : avx2 avx512f amx_bf16", "highest"),
        (INTEL + "flags : avx2 avx512f", "highest"),
        ("", "highest"),
    ],
)
def test_only_where_onednn_is_quicker_and_as_precise(on_processor, text, inside):
    on_processor(text)
    with suppress(KeyError), quick_products():
        assert torch.get_float32_matmul_precision() == inside
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_precision_that_the_user_chose_stays(on_processor):
    on_processor(AMD + "flags : avx512f")
    torch.set_float32_matmul_precision("high")
    try:
        with quick_products():
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("shape", [(40, 300), (2, 20, 300), (300,)])
@pytest.mark.parametrize("stored", ["as it is", "transposed"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_layer_and_its_gradients_are_those_of_double_precision(shape, stored, with_bias):
    torch.manual_seed(0)
    weight = torch.randn(200, 300) if stored == "as it is" else torch.randn(300, 200).T
    leaves = [torch.randn(shape), weight, *[torch.randn(200)] * with_bias]
    upstream = torch.randn(*shape[:-1], 200)

    def results(function, dtype):
        given = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        result = function(*given)
        return [result, *torch.autograd.grad(result, given, upstream.to(dtype))]

    ours = results(linear, torch.float32)
    for found, exact in zip(ours, results(torch.nn.functional.linear, torch.float64), strict=True):
        assert found.shape == exact.shape
        assert (found - exact).norm() < 2e-6 * exact.norm()
    # A gradient in another order than its weight would be copied before each step of the optimizer
    assert ours[2].stride() == weight.stride()


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_weights_and_biases_get_no_gradient(frozen):
    leaves = [torch.ones(4, 3), torch.ones(2, 3), torch.ones(2)]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index != frozen)
    linear(*leaves).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [index == frozen for index in range(3)]
