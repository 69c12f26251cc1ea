"""Splitting a causal language model into backbone and head, so that the head can be applied tile by tile."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_klrb.models.generation import Rollout

TRIAL_LENGTH = 4


class SplitModel(NamedTuple):
    """Parts of a model whose logits are softcap(head(backbone(tokens))); references, not copies."""

    backbone: nn.Module
    head: nn.Linear
    softcap: float | None

    def hidden_states(self, rollout: Rollout) -> Tensor:
        """Inputs of the head that predict the completion tokens, shape [B, T, D]."""
        hidden: Tensor = self.backbone(**model_inputs(rollout)).last_hidden_state
        return hidden[:, -rollout.mask.shape[1] :]


def split_model(model: PreTrainedModel) -> SplitModel | None:
    """Backbone and head of a model, or None if its logits are computed in another way.

    The split is verified on a few tokens, where the parts must reproduce the model's logits, so it does not
    depend on a list of architectures.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    # Not isinstance: a head with an adapter is a subclass, and a new adapter would pass the trial, as it
    # starts at zero
    if backbone is model or type(head) is not nn.Linear:
        return None
    split = SplitModel(backbone, head, getattr(model.config, "final_logit_softcapping", None))
    return split if _parts_agree(model, split) else None


def model_inputs(rollout: Rollout) -> dict[str, Tensor | bool]:
    """Arguments of a model's forward pass, without the last token, which predicts none of the completion."""
    return {
        "input_ids": rollout.tokens[:, :-1],
        "attention_mask": rollout.attention_mask[:, :-1].long(),
        "position_ids": rollout.position_ids[:, :-1],
        "use_cache": False,
    }


@torch.no_grad()
def _parts_agree(model: PreTrainedModel, split: SplitModel) -> bool:
    tokens = torch.arange(TRIAL_LENGTH + 1, device=model.device)[None] % split.head.out_features
    everything = torch.ones_like(tokens, dtype=torch.bool)
    rollout = Rollout(tokens, everything, everything[:, 1:])
    was_training = model.training
    model.eval()
    expected = model(**model_inputs(rollout)).logits
    logits = split.head(split.hidden_states(rollout))
    model.train(was_training)
    if split.softcap is not None:
        logits = split.softcap * torch.tanh(logits / split.softcap)
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-2, atol=1e-3)
