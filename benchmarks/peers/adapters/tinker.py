"""tinker-cookbook: the KL as advantages in distillation and RL, and its client-side reverse KL."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..importing import load, parameter_default
from ..setting import Setting

DISTRIBUTION = "tinker-cookbook"


def _later(value: Any) -> SimpleNamespace:
    """What a client's call returns: an awaitable behind `coroutine`."""

    async def answer() -> Any:
        return value

    return SimpleNamespace(coroutine=answer)


def _datum(tinker: Any, logprobs: Tensor) -> SimpleNamespace:
    sequence = SimpleNamespace(append_int=lambda token: None, length=len(logprobs))
    tensors = {
        "logprobs": logprobs,
        "mask": torch.ones_like(logprobs),
        "advantages": torch.zeros_like(logprobs),
    }
    inputs = {key: tinker.TensorData.from_torch(values.float()) for key, values in tensors.items()}
    return SimpleNamespace(
        model_input=sequence, loss_fn_inputs=inputs | {"target_tokens": SimpleNamespace(data=[0])}
    )


def _penalty(tinker: Any, penalise: Any) -> Any:
    """The advantages that hold the KL, in the documented loss of the service: minus ratio times advantage."""

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(-1).tolist()
        data = [_datum(tinker, row[:length]) for row, length in zip(old_logprobs, lengths, strict=True)]
        teacher = [[None, *row[:length].tolist()] for row, length in zip(ref_logprobs, lengths, strict=True)]
        asyncio.run(penalise(data, teacher))
        total = logprobs.new_zeros(())
        for datum, new, old, length in zip(data, logprobs, old_logprobs, lengths, strict=True):
            advantages = datum.loss_fn_inputs["advantages"].to_torch()
            total = total - ((new[:length] - old[:length]).exp() * advantages).sum()
        return total

    return loss


def _distillation(module: Any, discount: float) -> Any:
    async def penalise(data: list[Any], teacher: list[list[Any]]) -> None:
        clients = [SimpleNamespace(compute_logprobs=lambda _, row=row: _later(row)) for row in teacher]
        await module.incorporate_kl_penalty(data, clients, [0] * len(data), 1.0, discount)

    return penalise


def _rl(module: Any, discount: float) -> Any:
    async def penalise(data: list[Any], teacher: list[list[Any]]) -> None:
        async def scored(*_: Any) -> tuple[list[list[Any]], None]:
            return teacher, None

        module.score_sequences = scored
        await module.incorporate_kl_penalty(data, None, 1.0, discount)

    return penalise


def _client_side(sdft: Any, tinker: Any) -> Any:
    """`reverse_kl_custom_loss` of the student's log-probabilities of the teacher's head, renormalised."""

    def loss(all_logprobs: Tensor, topk_ids: Tensor, topk_logprobs: Tensor, mask: Tensor) -> Tensor:
        student = all_logprobs.gather(-1, topk_ids)
        data, rows = [], []
        for row, head, length in zip(student, topk_logprobs, mask.sum(-1).tolist(), strict=True):
            weights = tinker.TensorData.from_torch(head[:length].softmax(-1).float())
            data.append(SimpleNamespace(loss_fn_inputs={"weights": weights}))
            rows.append(row[:length])
        return sdft.reverse_kl_custom_loss(data, rows)[0]

    return loss


def settings() -> Iterator[Setting]:
    """The losses of tinker-cookbook."""
    tinker = load("tinker")
    distillation, metrics = (
        load(f"tinker_cookbook.{name}") for name in ("distillation.train_on_policy", "rl.metrics")
    )
    defaults = {"kl_discount_factor": parameter_default(distillation.Config, "kl_discount_factor")}
    for discount in (0.0, 1.0):
        options = {"kl_discount_factor": discount}
        function = _penalty(tinker, _distillation(distillation, discount))
        yield Setting(
            "distillation, incorporate_kl_penalty",
            options,
            defaults,
            "negative reverse KL as advantage",
            function,
        )
    for discount in (0.0, 1.0):
        options = {"kl_discount_factor": discount}
        function = _penalty(tinker, _rl(metrics, discount))
        yield Setting(
            "rl, incorporate_kl_penalty", options, defaults, "KL penalty against the base model", function
        )
    sdft = load("tinker_cookbook.distillation.sdft")
    yield Setting(
        "sdft, reverse_kl_custom_loss",
        {"reverse": True},
        {"reverse": False},
        "analytical reverse KL",
        _client_side(sdft, tinker),
    )
