"""The matrix products of an RLOO cycle alone: what share of the machine's peak their shapes allow."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lit_klrb.functional.products import quick_products

from .measure import DEVICE, interleaved_times
from .step_case import Task

ROUNDS = 3


class Products(NamedTuple):
    """Products with the weights of a model, which are too many to stay in a cache between two passes.

    Args:
        weights: The weights of all linear layers but the head, [outputs, inputs] each.
        head: The head, [V, D].
    """

    weights: list[Tensor]
    head: Tensor

    @staticmethod
    def of(task: Task, head_dtype: torch.dtype) -> "Products":
        """The products of a task's model."""
        model = AutoModelForCausalLM.from_pretrained(task.folder)
        # Layers of GPT-2 store the transpose
        weights = [
            (layer.weight if isinstance(layer, nn.Linear) else layer.weight.T).detach().to(DEVICE, task.dtype)
            for layer in model.base_model.modules()
            if isinstance(layer, (nn.Linear, Conv1D))
        ]
        return Products(weights, model.get_output_embeddings().weight.detach().to(DEVICE, head_dtype))

    def forward(self, rows: int, head_rows: int) -> None:
        """A forward pass of a number of tokens, with the head applied to some of them."""
        for weight, count in self._all(rows, head_rows):
            with quick_products():
                linear(_ones(count, weight.shape[1], weight.dtype), weight)

    def backward(self, rows: int, head_rows: int, of_weights: bool) -> None:
        """The gradients of inputs and weights."""
        for weight, count in self._all(rows, head_rows):
            upstream = _ones(count, len(weight), weight.dtype)
            with quick_products():
                upstream @ weight
                if of_weights:
                    upstream.T @ _ones(count, weight.shape[1], weight.dtype)

    def _all(self, rows: int, head_rows: int) -> list[tuple[Tensor, int]]:
        return [*((weight, rows) for weight in self.weights), *[(self.head, head_rows)] * (head_rows > 0)]


@functools.cache
def _ones(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(rows, columns, dtype=dtype, device=DEVICE)


def seconds(task: Task, inner_epochs: int, head_dtype: torch.dtype | None = None) -> float:
    """Time of a cycle's products: of each pass the fastest of some rounds.

    Args:
        task: Model and prompts.
        inner_epochs: Passes over the completions with gradients.
        head_dtype: Precision of the products with the head, except in sampling; by default as of the others.
    """
    sampling, passes = Products.of(task, task.dtype), Products.of(task, head_dtype or task.dtype)
    read = int(task.batch()["attention_mask"].sum())
    before = read - len(task.prompts)  # the last token of a prompt is read with its completion
    of_weights = task.lora is None

    def forward() -> None:
        passes.forward(before, 0)
        passes.forward(task.tokens, task.tokens)

    def backward() -> None:
        passes.backward(before, 0, of_weights)
        passes.backward(task.tokens, task.tokens, of_weights)

    times = interleaved_times(
        {
            "prompts": lambda: sampling.forward(read, len(task.prompts)),
            "token": lambda: sampling.forward(task.sequences, task.sequences),
            "forward": forward,
            "backward": backward,
        },
        ROUNDS,
    )
    counts = 1, task.completion_tokens - 1, 1 + inner_epochs, inner_epochs
    return sum(count * min(times[name]) for name, count in zip(times, counts, strict=True))
