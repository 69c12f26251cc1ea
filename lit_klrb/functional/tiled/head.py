"""A language-model head that is applied block by block, and its gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.functional.products import quick_products

# Columns of the vocabulary per block on a CPU: matrix products with 512 rows are fastest at about this size,
# and their result (8 MB) is still in the cache for the passes that follow.
_CPU_BLOCK = 4096


class Head(NamedTuple):
    """Logits x / T, or s / T tanh(x / s) with a soft cap s, where x = hidden · weightᵀ + bias.

    Computed as z = scale x, then cap tanh(z) if there is a cap. Hidden states are scaled once, in advance:
    they are the `inputs`, in float32 or float64, and products are computed in that precision.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    cap: float | None

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> "Head":
        """The head with detached weights; `HeadGradients` computes their gradients."""
        # With a cap s: s / T tanh(x / s) = cap tanh(scale x) for scale = 1 / s and cap = s / T
        scale, cap = (1 / temperature, None) if softcap is None else (1 / softcap, softcap / temperature)
        return Head(weight.detach(), None if bias is None else bias.detach(), scale, cap)

    def inputs(self, hidden: Tensor) -> Tensor:
        """Scaled hidden states."""
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return hidden.detach().to(dtype) * self.scale

    def blocks(self) -> list[slice]:
        """Blocks of the vocabulary, the last one possibly shorter; a single block on a GPU."""
        size = len(self.weight)
        step = _CPU_BLOCK if self.weight.device.type == "cpu" else size
        return [slice(start, min(start + step, size)) for start in range(0, size, step)]

    def logits(self, inputs: Tensor, weight: Tensor, block: slice, out: Tensor) -> Tensor:
        """Write the logits [N, block] to `out`; `weight` is the block's, in the precision of the inputs."""
        with quick_products():
            if self.bias is None:
                z = torch.mm(inputs, weight.T, out=out)
            else:
                bias = self.bias[block].to(inputs.dtype) * self.scale
                z = torch.addmm(bias, inputs, weight.T, out=out)
        return z if self.cap is None else z.tanh_().mul_(self.cap)

    def token_logits(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        """The logit of one token per row, shape [N]."""
        z = (inputs * self.weight[tokens].to(inputs.dtype)).sum(-1)
        if self.bias is not None:
            z = z + self.bias[tokens].to(inputs.dtype) * self.scale
        return z if self.cap is None else z.tanh() * self.cap

    def through_cap(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient with respect to z from the gradient with respect to the logits."""
        # d(cap tanh z) / dz = cap (1 - tanh^2 z)
        return gradient if self.cap is None else gradient * (self.cap - logits.square() / self.cap)


class _WeightGradient:
    """The gradient of a head's weight, shape [V, D], accumulated in the precision of the inputs.

    If the weight has lower precision, each block is accumulated in a separate tensor, which `finish` rounds
    and frees before the next: the sum and its rounded copy never exist in full at the same time.
    """

    def __init__(self, head: Head, inputs: Tensor) -> None:
        self._result = torch.empty_like(head.weight)
        parts = [self._result[block] for block in head.blocks()]
        if head.weight.dtype != inputs.dtype:
            parts = [inputs.new_empty(part.shape) for part in parts]
        self._sums = {block.start: part for block, part in zip(head.blocks(), parts, strict=True)}
        self._empty = set(self._sums)  # uninitialised memory: the first product overwrites it

    def add(self, block: slice, gradient: Tensor, inputs: Tensor) -> None:
        """Add the transpose of a tile's gradient [N, block] times its inputs [N, D]."""
        if block.start in self._empty:
            self._empty.remove(block.start)
            torch.mm(gradient.T, inputs, out=self._sums[block.start])
        else:
            self._sums[block.start].addmm_(gradient.T, inputs)

    def add_rows(self, tokens: Tensor, values: Tensor) -> None:
        """Add values [N, D] to the rows of tokens [N]; tokens may repeat."""
        for start, block in self._sums.items():
            # On a GPU, where there is one block, a choice of rows would wait for all that it has to do
            inside: Any = slice(None)
            if len(self._sums) > 1:
                inside = (tokens >= start) & (tokens < start + len(block))
            block.index_add_(0, tokens[inside] - start, values[inside])

    def finish(self) -> Tensor:
        """The gradient in the dtype of the weight."""
        for start in list(self._sums):
            block = self._sums.pop(start)
            if block.dtype != self._result.dtype:
                self._result[start : start + len(block)] = block
        return self._result


class HeadGradients:
    """Gradients of a head, accumulated over tiles and blocks in the precision of the inputs.

    Args:
        head: The head.
        inputs: Its scaled hidden states, shape [N, D].
        needed: Whether the gradients of hidden states, weight and bias are needed.
    """

    def __init__(self, head: Head, inputs: Tensor, needed: tuple[bool, bool, bool]) -> None:
        self._head, self._inputs = head, inputs
        self.needed = any(needed)
        for_hidden, for_weight, for_bias = needed
        self._hidden = torch.zeros_like(inputs) if for_hidden else None
        self._weight = _WeightGradient(head, inputs) if for_weight else None
        self._bias = inputs.new_zeros(len(head.weight)) if for_bias else None

    def add(self, gradient: Tensor, weight: Tensor, rows: slice, block: slice) -> None:
        """Backpropagate the gradient with respect to z, shape [rows, block]; `weight` is the block's."""
        with quick_products():
            if self._hidden is not None:
                self._hidden[rows].addmm_(gradient, weight)
            if self._weight is not None:
                self._weight.add(block, gradient, self._inputs[rows])
        if self._bias is not None:
            self._bias[block].add_(gradient.sum(0))

    def add_tokens(self, gradient: Tensor, tokens: Tensor, rows: slice) -> None:
        """Backpropagate the gradient with respect to the logit of one token per row, shape [rows]."""
        head, inputs = self._head, self._inputs[rows]
        if head.cap is not None:
            gradient = head.through_cap(gradient, head.token_logits(inputs, tokens))
        column = gradient.unsqueeze(-1)
        if self._hidden is not None:
            self._hidden[rows].addcmul_(column, head.weight[tokens].to(inputs.dtype))
        if self._weight is not None:
            self._weight.add_rows(tokens, column * inputs)
        if self._bias is not None:
            self._bias.index_add_(0, tokens, gradient)

    def finish(self, hidden_dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden states, weight and bias, each in the dtype of its tensor."""
        head = self._head
        # The inputs of the products were scale · hidden, so the weight's gradient has the factor already
        hidden = None if self._hidden is None else self._hidden.mul_(head.scale).to(hidden_dtype)
        weight = None if self._weight is None else self._weight.finish()
        if self._bias is None or head.bias is None:
            return hidden, weight, None
        return hidden, weight, self._bias.mul_(head.scale).to(head.bias.dtype)
