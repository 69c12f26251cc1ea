"""A linear layer's products of float32 matrices by MKL and by oneDNN."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from lit_klrb.functional import products

from .measure import interleaved_times, machine
from .rounds import median_text
from .table import markdown

# Tokens, outputs and inputs: layers of SmolLM2 on completions and on prompts, a tile of its head, a demo's
SHAPES = [
    (768, 1536, 576),
    (768, 576, 1536),
    (768, 576, 576),
    (80, 1536, 576),
    (512, 4096, 576),
    (2048, 512, 128),
]
ROUNDS = 40
# Layers in turn, so that no weight is in the processor's cache
LAYERS = 10


def report(quick: bool) -> str:
    """Ratios of seconds, forward and backward, and errors of results and gradients against float64."""
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        tokens, outputs, width = shape
        sizes = [(tokens, width), (outputs, width), (tokens, outputs)]
        layers = [[torch.randn(size) for size in sizes] for _ in range(LAYERS)]
        both = {"MKL": linear, "oneDNN": products.linear}
        runs = {name: functools.partial(_all, function, layers) for name, function in both.items()}
        times = interleaved_times(runs, 3 if quick else ROUNDS)
        exact = _pass(linear, *(tensor.double() for tensor in layers[0]))
        errors = [_error(_pass(function, *layers[0]), exact) for function in both.values()]
        ratio = median_text(times["oneDNN"], times["MKL"])
        rows.append([" × ".join(map(str, shape)), ratio, *(f"{error:.1e}" for error in errors)])
    header = ["tokens × outputs × inputs", "oneDNN / MKL", "error of MKL", "of oneDNN"]
    used = "is" if products.onednn_is_quicker() else "is not"
    return (
        f"## Products of float32 matrices\n\n`python -m benchmarks products` on {machine(['torch'])}; "
        f"oneDNN {used} used here. Seconds of a layer's forward and backward pass, {ROUNDS} rounds in turn, "
        "medians with their 95 % intervals; errors in the Euclidean norm, the largest of result and "
        "gradients.\n\n"
    ) + markdown(header, rows)


def _all(function: Callable[[Tensor, Tensor], Tensor], layers: list[list[Tensor]]) -> None:
    for layer in layers:
        _pass(function, *layer)


def _pass(
    function: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, weight: Tensor, upstream: Tensor
) -> list[Tensor]:
    leaves = inputs.detach().requires_grad_(), weight.detach().requires_grad_()
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True))
