"""Every family of language models that transformers can build, tiny, against plain forward passes."""

import signal
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lit_klrb.engine import generation
from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.errors import ConfigurationError, brief
from lit_klrb.models.capabilities import continues
from lit_klrb.models.loading import silence
from lit_klrb.models.roles import POLICY, check_predicts, fuse_activations
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.scoring import Scorer
from lit_klrb.seeding import forked_rng

from .table import markdown

VOCABULARY, TEMPERATURE = 64, 0.7
# CPU seconds after which a family is given up, such as one whose smallest form is still large.
LIMIT = 15
# Settings that make a model small, wherever its configuration has them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers",), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "moe_intermediate_size"), 48),
    **dict.fromkeys(
        ("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "shared_intermediate_size"), 48
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_size"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"sliding_window": 6, "state_size": 4, "time_step_rank": 4, "conv_kernel": 4},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
}
# Settings that are set even if they are None by default, from which some models compute.
DERIVED = ("head_dim", "num_key_value_heads")
# Settings that list the kinds of layers, of which the first and the last one are built.
LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
# What some families need beside.
OWN: dict[str, dict[str, Any]] = {
    **{kind: {"rotary_dim": 4} for kind in ("gptj", "codegen")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6, "num_layers": 2},
    "mamba2": {"head_dim": 16, "n_groups": 1},
}


# How the reasons begin, or what they contain.
UNBUILT, FAILED, PADDING = "not built: ", "fails: ", "padding on the left"


class Trial(NamedTuple):
    """What was found about a family.

    Attributes:
        kind: Its `model_type`.
        refused: The reason in one line; None if it is supported.
        dtype: In which it was compared.
        scored: Largest error of a log-probability or a KL, in nats.
        sampled: Largest error of a probability that is sampled from.
        tiled: Whether its head is applied tile by tile.
        cached: Whether it is sampled from cached states.
    """

    kind: str
    refused: str | None
    dtype: torch.dtype = torch.float64
    scored: float = 0.0
    sampled: float = 0.0
    tiled: bool = False
    cached: bool = False


def tiny(kind: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A tiny model of a family, with weights so large that every part matters.

    Args:
        kind: Its `model_type`.
        seed: Seed of the weights.
        dtype: Of weights and computation.
    """
    config = AutoConfig.for_model(kind, **{**_settings(AutoConfig.for_model(kind)), **OWN.get(kind, {})})
    with forked_rng(seed):
        # The other implementation of experts knows no float64
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        fuse_activations(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = _settings(value)
        elif name in SIZES and (value is not None or name in DERIVED):
            settings[name] = SIZES[name]
        elif name in LAYER_KINDS and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            settings[name] = [kinds[0], kinds[-1]]
    if "kv_lora_rank" in settings:  # one compressed state for all heads
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return settings


def trial(kind: str, dtype: torch.dtype = torch.float64) -> Trial:
    """Compare scores and samples of a family with plain forward passes of single sequences.

    Args:
        kind: Its `model_type`.
        dtype: Of weights and computation.
    """
    policy, reference = (tiny(kind, seed, dtype) for seed in (0, 1))
    try:
        check_predicts(None, policy, POLICY)
    except ConfigurationError as error:
        return Trial(kind, str(error), dtype)
    prompts = torch.randint(1, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(6) >= torch.tensor([[0], [2], [5]])
    sampling, seen = Sampling(2, 8, TEMPERATURE), []
    inverse = generation.inverse_transform
    with mock.patch.object(generation, "inverse_transform", lambda p, u: (seen.append(p), inverse(p, u))[1]):
        rollout = generate_completions(policy, prompts, mask, sampling, seed=0, ends=[0], pad_token_id=0)
    scorer = Scorer(policy, reference, TEMPERATURE)
    with torch.no_grad():
        stats = scorer.stats(rollout, scorer.reference_states(rollout)).masked(rollout.mask)
        plain, other = (plain_logprobs(model, rollout) for model in (policy, reference))
    chosen = plain.gather(-1, rollout.completions[..., None])[..., 0]
    kl = (plain.exp() * (plain - other)).sum(-1)
    assert stats.kl is not None
    scored = [
        (ours - theirs)[rollout.mask].abs().max()
        for ours, theirs in ((stats.logprobs, chosen), (stats.kl, kl))
    ]
    sampled = (torch.stack(seen, 1).double() - plain.exp())[rollout.mask].abs().max()
    return Trial(kind, None, dtype, float(max(scored)), float(sampled), scorer.tiled, continues(policy))


def plain_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Log-probabilities at the positions of the completions, shape [B, T, V], without padding and cache."""
    length = rollout.mask.shape[1]
    rows = []
    for tokens, mask in zip(rollout.tokens, rollout.attention_mask, strict=True):
        first = int(mask.long().argmax())
        logits = model(input_ids=tokens[None, first:], use_cache=False).logits[0, -length - 1 : -1]
        rows.append((logits.double() / TEMPERATURE).log_softmax(-1))
    return torch.stack(rows)


def examine(kind: str) -> Trial:
    """`trial` in float64, or in float32 where float64 makes no numbers of padding; never raises.

    Args:
        kind: Its `model_type`.
    """
    try:
        tiny(kind)
    except Exception as error:  # configurations raise all kinds of exceptions
        return Trial(kind, UNBUILT + brief(error))
    try:
        result = trial(kind)
        return trial(kind, torch.float32) if result.refused and PADDING in result.refused else result
    except Exception as error:
        return Trial(kind, FAILED + brief(error))


def report(quick: bool) -> str:
    """What was found about all families, as the part of a document.

    Args:
        quick: Only a few families.
    """
    silence()
    kinds = ["gpt2", "llama", "bart", "bert"] if quick else sorted(POLICY.architectures)
    trials = [_examine_for_some_time(kind) for kind in track(kinds, "families")]
    agreeing = [trial for trial in trials if trial.refused is None]
    rows = [
        [
            dtype_name,
            str(len(some)),
            f"{max(t.scored for t in some):.1e}",
            f"{max(t.sampled for t in some):.1e}",
        ]
        for dtype_name, some in (
            (str(dtype).removeprefix("torch."), [t for t in agreeing if t.dtype == dtype])
            for dtype in (torch.float64, torch.float32)
        )
        if some
    ]
    header = ["compared in", "families", "log-probability or KL, nats", "sampled probability"]
    lists = {
        "Supported": agreeing,
        "Of these, sampled from whole sequences, as their cache does not hold all states": [
            t for t in agreeing if not t.cached
        ],
        "Of these, scored through full logits, as more than a linear head makes them": [
            t for t in agreeing if not t.tiled
        ],
        "Refused, as padding changes their predictions": _refused(trials, PADDING),
        "Refused, as they are encoders": _refused(trials, "reads the tokens"),
        "Refused, as their logits are not finite": _refused(trials, "not finite"),
        "Refused by their own code, in a tiny form": _refused(trials, FAILED),
        "Not built in a tiny form, thus not examined": _refused(trials, UNBUILT),
    }
    parts = [
        f"{name} ({len(some)}): {', '.join(t.kind for t in some)}." for name, some in lists.items() if some
    ]
    return "\n\n".join([markdown(header, rows), *parts])


class _OutOfTimeError(BaseException):
    """Not an `Exception`, which the trials of a model catch."""


def _examine_for_some_time(kind: str) -> Trial:
    def stop(*_: object) -> None:
        raise _OutOfTimeError

    earlier = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        try:
            return examine(kind)
        finally:  # where the signal may arrive, too, after a long operation
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OutOfTimeError:
        return Trial(kind, f"{UNBUILT}takes more than {LIMIT} CPU seconds")
    finally:
        signal.signal(signal.SIGPROF, earlier)


def _refused(trials: Sequence[Trial], reason: str) -> list[Trial]:
    return [trial for trial in trials if trial.refused is not None and reason in trial.refused]
