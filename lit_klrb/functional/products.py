"""Products of float32 matrices by the quicker of the two libraries that torch has for them on a CPU."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_INFO = Path("/proc/cpuinfo")


@functools.cache
def onednn_is_quicker() -> bool:
    """Whether oneDNN multiplies float32 matrices in less time than MKL and in float32: AMD's AVX-512 units.

    There it takes 0.74 to 0.87 of the time, with relative errors of 4e-7 to 6e-7 instead of 2.5e-7 (AMD EPYC,
    `python -m benchmarks products`). By torch's interface it may also round to bfloat16, which it does where
    the processor has matrix units for that (AMX): those keep MKL.
    """
    words = {*CPU_INFO.read_text("utf-8").split()} if CPU_INFO.exists() else set()
    both: bool = all(library.is_available() for library in (torch.backends.mkldnn, torch.backends.mkl))
    return both and {"AuthenticAMD", "avx512f"} <= words and not any(word.startswith("amx") for word in words)


@contextmanager
def quick_products() -> Iterator[None]:
    """Products of float32 matrices by oneDNN in this block, if `onednn_is_quicker`.

    Not for products of few numbers, such as those within attention: each call costs microseconds more.
    """
    if not onednn_is_quicker() or torch.get_float32_matmul_precision() != "highest":
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, inputs · weightᵀ + bias, by quick products, and so its gradients; differentiable once.

    Args:
        inputs: Shape [..., D].
        weight: Shape [O, D].
        bias: Shape [O].

    Returns:
        Shape [..., O].

    Example:
        >>> linear(torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])).tolist()
        [11.0]
    """
    apply: Any = _Linear.apply
    result: Tensor = apply(inputs.reshape(-1, inputs.shape[-1]), weight, bias)
    return result.view(*inputs.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        with quick_products():
            return inputs @ weight.T if bias is None else torch.addmm(bias, inputs, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs, for_weight, for_bias = ctx.needs_input_grad
        of_inputs = of_weight = None
        with quick_products():
            if for_inputs:
                of_inputs = upstream @ weight
            if for_weight:  # in the order of the weight's memory, which an optimizer's step needs
                ordered = weight.is_contiguous()
                of_weight = upstream.T @ inputs if ordered else (inputs.T @ upstream).T
        return of_inputs, of_weight, upstream.sum(0) if for_bias else None
