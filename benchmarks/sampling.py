"""Sampling with weights that oneDNN has ordered, and how far from the policy its distribution is."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_klrb.engine import packed_weights as packing
from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.functional.sums import full_precision
from lit_klrb.models.adapters import add_adapter
from lit_klrb.models.heads import split_model
from lit_klrb.models.rollout import Rollout

from . import step_case as case
from .measure import interleaved_times, machine
from .rounds import median_text
from .step import LORA
from .table import markdown

ROUNDS = 10
# Standard deviation of the adapter's second matrix, which is zero before training
SCALE = 0.02
# Passes from which on weights are ordered: the package's number, and none
PACKED, PLAIN = packing.LEAST_PASSES, 1 << 30


def report(quick: bool) -> str:
    """Ratios of seconds, the share of equal tokens, and KL of sampler and policy: ten minutes."""
    task = case.smollm2("32-true")
    if not task.folder.exists():
        return f"not measured, as {case.SMOLLM2} does not exist; `make chat` makes it"
    rows, rounds = [], 3 if quick else ROUNDS
    for precision in (torch.float32, torch.bfloat16):
        for adapter in (None, 1, 2):
            model = AutoModelForCausalLM.from_pretrained(task.folder)
            if adapter is not None:
                add_adapter(model, LORA, adapter)
                _perturb(model, adapter)
            rows.append(_row(task, model, precision, adapter, rounds))
    header = ["precision", "adapter", "ordered / plain", "equal tokens", "KL, ordered", "KL, plain"]
    return (
        f"## Sampling with packed weights\n\n`python -m benchmarks sampling` on {machine(['torch'])}. "
        f"SmolLM2, {task.sequences} completions of {task.completion_tokens} tokens; {rounds} rounds in turn, "
        "median of the ratios with its 95 % interval. KL of the distribution that was drawn from and that of "
        "the policy in training, in nats per completion; random adapters, which are merged into ordered "
        "weights.\n\n"
    ) + markdown(header, rows)


def _row(
    task: case.Task, model: PreTrainedModel, precision: torch.dtype, adapter: int | None, rounds: int
) -> list[str]:
    runs = {
        name: functools.partial(_sample, task, model, precision, passes)
        for name, passes in (("ordered", PACKED), ("plain", PLAIN))
    }
    (ordered, kl), (plain, kl_plain) = (_distance(run, model, precision) for run in runs.values())
    times = interleaved_times(runs, rounds)
    equal = (ordered.completions == plain.completions).double().mean()
    name = str(precision).removeprefix("torch.")
    ratio = median_text(times["ordered"], times["plain"])
    return [name, str(adapter or "–"), ratio, f"{equal:.3f}", f"{kl:.2g}", f"{kl_plain:.2g}"]


def _perturb(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, SCALE, generator=generator)


def _sample(task: case.Task, model: PreTrainedModel, precision: torch.dtype, passes: int) -> Rollout:
    batch, settings = task.batch(), Sampling(task.completions_per_prompt, task.completion_tokens)
    packing.LEAST_PASSES = passes
    try:
        with torch.no_grad(), _autocast(precision):
            prompts = batch["tokens"], batch["attention_mask"]
            return generate_completions(model, *prompts, settings, seed=0, ends=(), pad_token_id=0)
    finally:
        packing.LEAST_PASSES = PACKED


def _autocast(precision: torch.dtype) -> AbstractContextManager[object]:
    """As Lightning's."""
    if precision == torch.float32:
        return nullcontext()
    return torch.autocast("cpu", precision, cache_enabled=False)


@torch.no_grad()
def _distance(
    sample: functools.partial[Rollout], model: PreTrainedModel, precision: torch.dtype
) -> tuple[Rollout, float]:
    """A rollout, and the mean over completions of KL(sampler ‖ policy), given their tokens."""
    parts = split_model(model)  # which tries the model on a few tokens
    assert parts is not None
    with _logits_of(model) as seen:
        rollout = sample()
    seen[0] = seen[0].repeat_interleave(len(rollout.mask) // len(seen[0]), 0)
    drawn = torch.stack(seen, 1).float().log_softmax(-1)
    with _autocast(precision):
        hidden = parts.hidden_states(rollout)
    weight, _ = parts.head_weights()
    policy = (full_precision(hidden) @ full_precision(weight).T).log_softmax(-1)
    return rollout, float((drawn.exp() * (drawn - policy)).sum(-1).sum(-1).mean())


@contextmanager
def _logits_of(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """The logits of the last token, of each pass in the block."""
    seen: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, inputs, result: seen.append(result.logits[:, -1].clone()))
    try:
        yield seen
    finally:
        hook.remove()
