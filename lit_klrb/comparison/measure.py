"""Token statistics of two models: on completions sampled from the first, or on given texts."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.comparison.estimates import TokenTable
from lit_klrb.data.batches import pad
from lit_klrb.data.encoding import end_tokens
from lit_klrb.distributed import stacked, stacked_stats
from lit_klrb.models import loading
from lit_klrb.models.adapters import has_adapter, merged
from lit_klrb.models.generation import Rollout, Sampling, generate_completions
from lit_klrb.models.scoring import Scorer
from lit_klrb.seeding import derive_seed

# Called with the number of rows that a batch had.
Advance = Callable[[int], None]


class Loaded(NamedTuple):
    """A model, frozen and without an adapter, and its tokenizer."""

    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a completion."""
        return end_tokens(self.tokenizer, self.model)


def load(key: str, path: str, device: torch.device | str) -> Loaded:
    """Load a model; a checkpoint's adapter is merged into its weights.

    Args:
        key: The argument that names it, for the error message.
        path: Hub id, folder or checkpoint.
        device: Where the model is moved to.

    Raises:
        ConfigurationError: If it cannot be loaded.
    """
    model = loading.load_model(key, path)
    tokenizer = loading.load_tokenizer(key, path)
    model = loading.freeze(merged(model) if has_adapter(model) else model)
    return Loaded(path, model.to(device), tokenizer)  # type: ignore[arg-type]


def check_tokenizers(key: str, first: Loaded, second: Loaded) -> str:
    """Check that token ids have the same meaning for two models, and say what differs.

    Args:
        key: The argument that names the second model, for the error message.
        first: The policy.
        second: The model that it is compared with.

    Raises:
        ConfigurationError: If an id has two meanings, or the heads have different sizes.
    """
    ids, others = first.tokenizer.get_vocab(), second.tokenizer.get_vocab()
    loading.check_same_vocabulary(key, second.path, ids, others)
    heads: list[Any] = [model.get_output_embeddings() for model in (first.model, second.model)]  # type: ignore[no-untyped-call]
    loading.check_same_size(key, second.path, *(head.weight.shape[0] for head in heads))
    notes = [f"{len(set(ids.values()) & set(others.values()))} ids have the same meaning for both"]
    if alone := len(set(ids.values()) ^ set(others.values())):
        notes.append(f"{alone} are in only one of the vocabularies")
    ends = [
        " or ".join(map(repr, model.tokenizer.convert_ids_to_tokens(list(model.ends))))
        for model in (first, second)
    ]
    if ends[0] != ends[1]:
        notes.append(f"completions end with the policy's {ends[0]}, the other's end is {ends[1]}")
    return "; ".join(notes)


def sampled_rollouts(
    loaded: Loaded,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    *,
    seed: int,
    batch_size: int,
    advance: Advance,
) -> list[Rollout]:
    """Completions of all prompts, on the CPU.

    Args:
        loaded: The model that is sampled from.
        prompts: Token ids of each prompt.
        sampling: Completions per prompt, maximum length, temperature.
        seed: The same seed gives the same uniform numbers for every model.
        batch_size: Prompts per batch.
        advance: Called after each batch.
    """
    rollouts = []
    for first in range(0, len(prompts), batch_size):
        some = prompts[first : first + batch_size]
        batch = pad(some, loaded.tokenizer.pad_token_id, side="left")
        device = loaded.model.device
        rollout = generate_completions(
            loaded.model,
            batch["tokens"].to(device),
            batch["attention_mask"].to(device),
            sampling,
            seed=derive_seed(seed, "completions", first),
            ends=loaded.ends,
            pad_token_id=loaded.tokenizer.pad_token_id,
        )
        rollouts.append(rollout.map(Tensor.cpu))
        advance(len(some))
    return rollouts


def text_rollouts(windows: Sequence[list[int]], pad_token_id: int, batch_size: int) -> list[Rollout]:
    """Windows of texts as rollouts: the first token is the prompt, the others are the completion.

    Args:
        windows: Token ids of each window, at least two.
        pad_token_id: Fills the positions after the end.
        batch_size: Windows per batch.
    """
    rollouts = []
    for first in range(0, len(windows), batch_size):
        batch = pad(windows[first : first + batch_size], pad_token_id, side="right")
        mask = batch["attention_mask"]
        rollouts.append(Rollout(batch["tokens"], mask, mask[:, 1:]))
    return rollouts


@torch.no_grad()
def token_table(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    rollouts: Sequence[Rollout],
    temperature: float,
    *,
    read: Sequence[Rollout] | None = None,
    cluster: Tensor,
    group_size: int | None,
    advance: Advance,
) -> TokenTable:
    """The statistics of all tokens under two models, without [B, T, V] logits if both models can be split.

    Args:
        policy: The model p of KL(p‖q).
        reference: The model q.
        rollouts: The batches.
        temperature: Divides the logits of both models.
        read: The same completions after the prompts that the reference reads, if they are others.
        cluster: Number of each row's cluster, shape [S].
        group_size: Completions per prompt if the completions are samples from p, else None.
        advance: Called after each batch.
    """
    scorer, parts = Scorer(policy, reference, temperature), []
    for pair in zip(rollouts, read or rollouts, strict=True):
        rollout, as_read = (some.map(lambda field: field.to(policy.device)) for some in pair)
        stats = scorer.stats(rollout, scorer.reference_states(as_read)).masked(rollout.mask)
        parts.append(stats.map(Tensor.cpu))
        advance(len(rollout.mask))
    tokens = stacked([rollout.completions for rollout in rollouts])
    mask = stacked([rollout.mask for rollout in rollouts])
    return TokenTable(stacked_stats(parts), mask, tokens, cluster, group_size)


@torch.no_grad()
def noise_floor(policy: PreTrainedModel, rollout: Rollout, temperature: float) -> dict[str, TokenTable]:
    """The KL of a model to itself that rounding alone gives.

    Args:
        policy: The model.
        rollout: Some sequences.
        temperature: Divides the logits.

    Returns:
        Statistics of the model against itself, one sequence at a time without left padding ("batch of one"),
        and against its copy in another dtype, named by that dtype, if it can be cast.
    """
    rollout = rollout.map(lambda field: field.to(policy.device))
    # A shallow copy, as the policy itself would stand for a reference with its adapter disabled
    scorer = Scorer(policy, copy.copy(policy), temperature)
    rows = (_without_padding(rollout, row) for row in range(len(rollout.mask)))
    alone = torch.cat([scorer.reference_states(row) for row in rows])
    tables = {"batch of one": _self_table(scorer, rollout, alone)}
    other = torch.bfloat16 if policy.dtype == torch.float32 else torch.float32
    if getattr(policy, "hf_quantizer", None) is not None:  # cannot be cast
        return tables
    scorer = Scorer(policy, copy.deepcopy(policy).to(other), temperature)  # type: ignore[arg-type]
    name = f"in {str(other).removeprefix('torch.')}"
    return {**tables, name: _self_table(scorer, rollout, scorer.reference_states(rollout))}


def _self_table(scorer: Scorer, rollout: Rollout, states: Tensor) -> TokenTable:
    stats = scorer.stats(rollout, states).masked(rollout.mask).map(Tensor.cpu)
    rows = torch.arange(len(rollout.mask))
    return TokenTable(stats, rollout.mask.cpu(), rollout.completions.cpu(), rows, 1)


def _without_padding(rollout: Rollout, row: int) -> Rollout:
    one = rollout.rows(slice(row, row + 1))
    first = int(one.attention_mask[0].long().argmax())
    return Rollout(one.tokens[:, first:], one.attention_mask[:, first:], one.mask)
