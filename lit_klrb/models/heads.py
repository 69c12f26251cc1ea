"""Splitting a causal language model into backbone and head, so that the head can be applied tile by tile."""

from contextlib import ExitStack
from copy import copy
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lit_klrb.distributed import whole
from lit_klrb.models import capabilities
from lit_klrb.models.capabilities import continuing, key_value_cache, position_ids
from lit_klrb.models.linear_layers import quick_layers
from lit_klrb.models.precision import fast_autocast
from lit_klrb.models.rollout import Rollout
from lit_klrb.models.sharding import RUN_BACKBONE, is_sharded

# Two sequences with the same prompt.
PROBE = [[0, 1, 2, 3, 4], [0, 1, 2, 4, 3]]
# Layers of a cache that hold keys and values alone, through which gradients are right.
CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
# The largest logit of the check, at which a cap of the logits shows, and other settings of a head.
LARGEST = 100.0
# Least number of rows that are read together, and the share of positions that reading by length must spare.
LEAST, SPARED = 8, 0.1
# The largest number of such parts of a batch, as each reads all weights.
MOST = 4
# Products with a weight that a further pass must spare, as one through a small model takes as long for few
# rows as for many: a pass over equal prompts, and each further part. On an H100 a pass takes Python some
# 0.2 s forward and backward (SmolLM2), in which the GPU could read about 30,000 tokens.
WORTH = {"cpu": (0.0, 5e7), "cuda": (3e12, 3e12)}


class SplitModel(NamedTuple):
    """Parts of a model whose logits are softcap(head(backbone(tokens))); references, not copies.

    Args:
        model: The model.
        backbone: The model without its head.
        head: The head.
        softcap: Soft cap of the logits; None without one.
        caches: Whether the backbone can continue from cached keys and values.
    """

    model: PreTrainedModel
    backbone: PreTrainedModel
    head: nn.Linear
    softcap: float | None
    caches: bool

    @property
    def weights(self) -> int:
        """Number of the backbone's weights that each token is multiplied with."""
        embedded: Any = self.backbone.get_input_embeddings()
        return sum(weight.numel() for weight in self.backbone.parameters()) - embedded.weight.numel()

    def hidden_states(self, rollout: Rollout, worth: tuple[float, float] | None = None) -> Tensor:
        """Inputs of the head that predict the completion tokens, shape [B, T, D].

        Rows of similar length are read together, and equal prompts once if the model caches keys and values:
        the hidden states and their gradients are the same, up to rounding; those of padding are arbitrary.

        Args:
            rollout: B sequences with T completion positions.
            worth: What a pass over equal prompts and each further part must spare; that of the device by
                default, see `WORTH`.
        """
        width, device_type = rollout.mask.shape[1], rollout.mask.device.type
        of_prompts, of_parts = worth or WORTH.get(device_type, WORTH["cuda"])
        # Processes that share blocks read as many parts: one
        parts = by_length(rollout, 1 if is_sharded(self.model) else MOST, of_parts / self.weights)
        # Gradient checkpointing computes blocks again, without the cache; FSDP does not gather weights for
        # gradients through a cache
        recomputes = any(getattr(m, "gradient_checkpointing", False) for m in self.backbone.modules())
        whole_passes = recomputes or is_sharded(self.model)
        with ExitStack() as faster:
            if not whole_passes:
                faster.enter_context(fast_autocast(self.backbone))
                faster.enter_context(quick_layers(self.backbone))
            shares = self.caches and not whole_passes
            prompts = self._prompts(rollout, of_prompts / self.weights) if shares else None
            states = [self._read(rollout.part(*part), prompts, part[0]) for part in parts]
        dtype = self.head.weight.dtype
        if dtype.itemsize < states[0].dtype.itemsize and not torch.is_autocast_enabled(device_type):
            # Some architectures add up states in float32 beside weights of 16 bits, and round before the head
            states = [state.to(dtype) for state in states]
        if len(states) == 1:
            return states[0]
        whole_states = torch.cat([pad(state, (0, 0, 0, width - state.shape[1])) for state in states])
        return whole_states[torch.cat([rows for rows, _ in parts]).argsort()]

    def _prompts(self, rollout: Rollout, worth: float) -> tuple[DynamicCache, Tensor] | None:
        """Keys and values of distinct prompts, and which one each row has; None if that spares too few."""
        # The last token of a prompt predicts the first of the completion
        prefix = rollout.tokens.shape[1] - rollout.mask.shape[1] - 1
        if prefix < 1 or prefix * (len(rollout.mask) - 1) < worth:
            return None
        masked = torch.stack([rollout.tokens, rollout.attention_mask.long()], 1)[..., :prefix]
        prompts, rows = masked.unique(dim=0, return_inverse=True)
        spared = prefix * (len(rows) - len(prompts))
        if spared < max(worth, 1):
            return None
        cache, (tokens, mask) = key_value_cache(self.backbone), prompts.unbind(1)
        read = {"input_ids": tokens, "attention_mask": mask, "position_ids": position_ids(mask)}
        self.backbone(**read, **continuing(self.model, cache))
        return cache, rows

    def _read(self, rollout: Rollout, prompts: tuple[DynamicCache, Tensor] | None, part: Tensor) -> Tensor:
        """Hidden states of sequences that are read together, those of `part`, shape [B, T, D]."""
        length, inputs = rollout.mask.shape[1], model_inputs(rollout)
        run = getattr(self.model, RUN_BACKBONE, self.backbone)
        if prompts is not None:
            read, rows = prompts
            cache = copy(read)  # each part goes on from the same keys and values
            cache.layers = [copy(layer) for layer in read.layers]
            cache.reorder_cache(rows[part])  # type: ignore[arg-type]
            for name in ("input_ids", "position_ids"):
                inputs[name] = inputs[name][:, -length:]
            inputs |= continuing(self.model, cache)
            run = self.backbone
        hidden: Tensor = run(**inputs).last_hidden_state
        return hidden[:, -length:]

    def head_weights(self, rows: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the head, gathered if the model is sharded.

        Those of a policy have gradients only after `hidden_states`, which gathers them for the backward pass.
        """
        weights = whole(self.head.weight), None if self.head.bias is None else whole(self.head.bias)
        if rows is None:
            return weights
        return weights[0][:rows], None if weights[1] is None else weights[1][:rows]


def by_length(rollout: Rollout, most: int, worth: float) -> list[tuple[Tensor, int]]:
    """Rows of similar length, to be read together, so that little of what is read is padding.

    Args:
        rollout: B sequences with T completion positions.
        most: The largest number of parts.
        worth: Number of positions that each further part must spare.

    Returns:
        Indices of rows, and their largest length from 1 to T; one part if more would spare too little.
    """
    width = rollout.mask.shape[1]
    positions = torch.arange(1, width + 1, device=rollout.mask.device)
    lengths, rows = (
        (rollout.attention_mask[:, -width:] * positions)
        .amax(1)
        .clamp(min=1)
        .sort(descending=True, stable=True)
    )
    longest = lengths.tolist()
    for count in range(most, 1, -1):
        chunks = rows.chunk(count)
        starts = accumulate(map(len, chunks[:-1]), initial=0)
        parts = [(chunk, longest[start]) for chunk, start in zip(chunks, starts, strict=True)]
        read = sum(len(part) * length for part, length in parts)
        spared = rollout.mask.numel() - read
        enough = max(SPARED * rollout.mask.numel(), worth * (count - 1))
        if len(rows) >= LEAST * count and spared >= enough:
            return parts
    return [(torch.arange(len(rows), device=rows.device), width)]


def split_model(model: PreTrainedModel) -> SplitModel | None:
    """Backbone and head of a model, or None if its logits are computed in another way.

    The split is verified on a few tokens, where the parts must reproduce the model's logits, so it does not
    depend on a list of architectures.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    # Not isinstance: a head with an adapter is a subclass, and a new adapter would pass the check, as it
    # starts at zero
    if backbone is model or not isinstance(backbone, PreTrainedModel) or type(head) is not nn.Linear:
        return None
    softcap = getattr(model.config, "final_logit_softcapping", None)
    if not capabilities.has_weights(model):
        return SplitModel(model, backbone, head, softcap, caches=False)
    for caches in (True, False):
        split = SplitModel(model, backbone, head, softcap, caches)
        if _parts_agree(model, split):
            return split
    return None


def model_inputs(rollout: Rollout) -> dict[str, Any]:
    """Arguments of a model's forward pass, without the last token, which predicts none of the completion."""
    return {
        "input_ids": rollout.tokens[:, :-1],
        "attention_mask": rollout.attention_mask[:, :-1].long(),
        "position_ids": rollout.position_ids[:, :-1],
        "use_cache": False,
    }


@torch.no_grad()
def _parts_agree(model: PreTrainedModel, split: SplitModel) -> bool:
    tokens = torch.tensor(PROBE, device=model.device) % split.head.out_features
    everything = torch.ones_like(tokens, dtype=torch.bool)
    rollout = Rollout(tokens, everything, everything[:, -2:])
    with capabilities.eval_mode(model), capabilities.full_precision_forward(model):
        caches_attention = all(type(layer) in CACHE_LAYERS for layer in key_value_cache(model).layers)
        if split.caches and not (caches_attention and capabilities.continues(model)):
            return False
        hidden = split.hidden_states(rollout, worth=(0, 0))
        scale = LARGEST / split.head(hidden).abs().max().clamp(min=torch.finfo(hidden.dtype).tiny)
        # The logits of new weights are so small that a cap of them is lost in rounding
        with split.head.register_forward_hook(lambda _, inputs, logits: scale * logits):
            expected, logits = model(**model_inputs(rollout)).logits[:, -2:], split.head(hidden)
    if split.softcap is not None:
        logits = split.softcap * torch.tanh(logits / split.softcap)
    return capabilities.agree(logits, expected)
