"""Token statistics of two models: on completions of prompts by the first, or on given texts."""

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.comparison.estimates import TokenTable
from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.chat import is_unicode, shown
from lit_klrb.data.columns import TEXT
from lit_klrb.data.encode import encode
from lit_klrb.data.kinds import parse_rows
from lit_klrb.data.prompts import Prompt, read_prompts
from lit_klrb.data.reader import Reader
from lit_klrb.data.rows import RawRow, Table, suffix_of
from lit_klrb.distributed import stacked, stacked_stats
from lit_klrb.engine.generation import Sampling
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import local_path
from lit_klrb.models import loading
from lit_klrb.models.adapters import has_adapter, merged
from lit_klrb.models.dtypes import set_dtypes
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.pair import Loaded, Pair
from lit_klrb.rollouts.scoring import Scorer
from lit_klrb.seeding import derive_seed
from lit_klrb.terminal import say_once

# Called with the number of rows that a batch had.
Advance = Callable[[int], None]


def read_rows(key: str, source: str, limit: int = 0) -> list[RawRow]:
    """The rows of a file of prompts or texts, which of a .txt file are its lines."""
    path = local_path(source, key)
    if not path.exists():
        raise ConfigurationError(f"{source} does not exist", key=key)
    rows: Iterable[RawRow] = Table(key, [path])
    if suffix_of(path) == ".txt":
        rows = ({key.removesuffix("s"): row["text"]} for row in rows if str(row["text"]).strip())
    read = list(islice(rows, limit or None))
    if not read:
        raise ConfigurationError(f"{source} has no rows", key=key)
    return read


def encode_prompts(
    source: str,
    rows: Sequence[RawRow],
    tokenizer: PreTrainedTokenizerBase,
    system: str | None = None,
    teacher_system: str | None = None,
) -> list[Prompt]:
    """The prompts of rows, without cutting, and what the reference reads in their place.

    Each is a text, or a conversation that becomes one by the tokenizer's chat template; so is what the
    reference reads, the column `teacher_prompt`, with system prompts as in `PromptReader`.
    """
    parsed = parse_rows(source, rows, "prompts")
    if any(row.prompt is None for row in parsed):
        raise ConfigurationError(f"{source} has texts, whose beginnings are no prompts here", key="prompts")
    reader = Reader("prompts", tokenizer, (), system, say=say_once)
    return read_prompts(parsed, reader, 1, 1, teacher_system_prompt=teacher_system)


def encode_windows(
    source: str, rows: Sequence[RawRow], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Token ids of the texts of rows, cut into consecutive windows.

    The first token of each window only serves as context, so each window starts with the last token of the
    one before.

    Returns:
        The windows, and the number of the text of each; texts of fewer than two tokens are skipped, and the
        others numbered from 0.
    """
    windows, numbers, count = [], [], 0
    for number, row in enumerate(rows, 1):
        if not isinstance(text := row.get(TEXT), str | None) or TEXT not in row:
            has = f"the text {shown(text)}" if text else f"no column text; its columns: {', '.join(row)}"
            raise ConfigurationError(f"{source} row {number} has {has}", key="texts")
        if not is_unicode(text or ""):
            raise ConfigurationError(f"{source} row {number} has no Unicode text", key="texts")
        ids = encode(text or "", None, tokenizer).ids
        starts = range(0, len(ids) - 1, max_tokens - 1)
        windows += [ids[start : start + max_tokens] for start in starts]
        numbers += [count] * len(starts)
        count += bool(starts)
    if not windows:
        raise ConfigurationError("all texts have fewer than two tokens", key="texts")
    if count < len(rows):
        say_once(f"{len(rows) - count} of {len(rows)} texts are left out: fewer than two tokens")
    return windows, numbers


def load(key: str, path: str, device: torch.device | str) -> Loaded:
    """Load a model, frozen, in float32; a checkpoint's adapter is merged into its weights."""
    loaded = Loaded.of(key, path)
    set_dtypes(loaded.model, "32-true")
    model = loading.freeze(merged(loaded.model) if has_adapter(loaded.model) else loaded.model)
    return loaded._replace(model=model.to(device))  # type: ignore[arg-type]


def notes_of(pair: Pair) -> str:
    """What differs between the vocabularies and ends of two models, whose token ids have the same meaning."""
    assert pair.second is not None
    models = pair.first, pair.second
    ids, others = (set(model.tokenizer.get_vocab().values()) for model in models)
    notes = [f"{len(ids & others)} ids have the same meaning for both"]
    if alone := len(ids ^ others):
        notes.append(f"{alone} are in only one of the vocabularies")
    if pair.note is not None:
        notes.append(pair.note)
    ends = [
        " or ".join(map(repr, model.tokenizer.convert_ids_to_tokens(list(model.ends)))) for model in models
    ]
    if ends[0] != ends[1]:
        notes.append(f"completions end with the policy's {ends[0]}, the other's end is {ends[1]}")
    return "; ".join(notes)


def prompt_batches(prompts: Sequence[list[int]], pair: Pair, batch_size: int) -> list[Batch]:
    """Padded prompts, on the device of the models."""
    parts = (prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size))
    padded = (pad(part, pair.tokenizer.pad_token_id, side="left") for part in parts)
    return [{name: value.to(pair.policy.device) for name, value in batch.items()} for batch in padded]


def sampled_rollouts(
    pair: Pair, batches: Sequence[Batch], sampling: Sampling, *, seed: int, advance: Advance
) -> list[Rollout]:
    """Completions of all prompts by the policy of a pair, on the CPU."""
    rollouts, first = [], 0
    for batch in batches:
        rollout = pair.sample(batch, sampling, seed=derive_seed(seed, "completions", first))
        rollouts.append(rollout.map(Tensor.cpu))
        first += len(batch["tokens"])
        advance(len(batch["tokens"]))
    return rollouts


def text_rollouts(windows: Sequence[list[int]], pad_token_id: int, batch_size: int) -> list[Rollout]:
    """Windows of texts as rollouts: the first token is the prompt, the others are the completion."""
    rollouts = []
    for first in range(0, len(windows), batch_size):
        batch = pad(windows[first : first + batch_size], pad_token_id, side="right")
        mask = batch["attention_mask"]
        rollouts.append(Rollout(batch["tokens"], mask, mask[:, 1:]))
    return rollouts


@torch.no_grad()
def token_table(
    pair: Pair,
    rollouts: Sequence[Rollout],
    *,
    key: str,
    others: Sequence[Batch] = (),
    cluster: Tensor,
    group_size: int | None,
    advance: Advance,
) -> TokenTable:
    """The statistics of all tokens under two models, without [B, T, V] logits if both models can be split.

    Args:
        pair: The models p and q of KL(p‖q).
        rollouts: The batches.
        key: The argument that names the prompts or texts, for the error message.
        others: The prompts that q reads, if they are others.
        cluster: Number of each row's cluster, shape [S].
        group_size: Completions per prompt if they are samples from p; None for given texts.
        advance: Called after each batch.
    """
    parts = []
    for number, rollout in enumerate(rollouts):
        rollout = rollout.map(lambda field: field.to(pair.policy.device))
        prompts = {f"teacher_{name}": value for name, value in others[number].items()} if others else {}
        states = pair.scorer.reference_states(pair.read(rollout, prompts, key))
        stats = pair.scorer.stats(rollout, states).masked(rollout.mask)
        parts.append(stats.map(Tensor.cpu))
        advance(len(rollout.mask))
    mask = stacked([rollout.mask for rollout in rollouts])
    return TokenTable(stacked_stats(parts), mask, cluster, group_size)


@torch.no_grad()
def noise_floor(policy: PreTrainedModel, rollout: Rollout, temperature: float) -> dict[str, TokenTable]:
    """The KL of a model to itself that rounding alone gives.

    Returns:
        Statistics of the model against itself, one sequence at a time without left padding ("batch of one"),
        and against its copy in bfloat16 ("in bfloat16").
    """
    rollout = rollout.map(lambda field: field.to(policy.device))
    # A shallow copy, as the policy itself would stand for a reference with its adapter disabled
    scorer = Scorer(policy, copy.copy(policy), temperature)
    starts = rollout.attention_mask.long().argmax(1).tolist()  # without padding
    alone = []
    for row, start in enumerate(starts):
        tokens, attention, mask, _ = rollout.rows(slice(row, row + 1))
        alone.append(scorer.reference_states(Rollout(tokens[:, start:], attention[:, start:], mask)))
    table = _self_table(scorer, rollout, torch.cat(alone))
    other = copy.deepcopy(policy)
    set_dtypes(other, "bf16-true")
    scorer = Scorer(policy, other, temperature)
    return {
        "batch of one": table,
        "in bfloat16": _self_table(scorer, rollout, scorer.reference_states(rollout)),
    }


def _self_table(scorer: Scorer, rollout: Rollout, states: Tensor) -> TokenTable:
    stats = scorer.stats(rollout, states).masked(rollout.mask).map(Tensor.cpu)
    rows = torch.arange(len(rollout.mask))
    return TokenTable(stats, rollout.mask.cpu(), rows, 1)
