"""A causal language model as a backbone and a head, so that its logits need not be formed."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_klrb.models.generation import Rollout

PROBE_LENGTH = 4


class SplitModel(NamedTuple):
    """Logits of a model are softcap(head(backbone(tokens))); the parts are the model's own, not copies."""

    backbone: nn.Module
    head: nn.Linear
    softcap: float | None

    def hidden_states(self, rollout: Rollout) -> Tensor:
        """What the head reads before each completion token, [B, T, D]; prompts are left out."""
        hidden: Tensor = self.backbone(**model_inputs(rollout)).last_hidden_state
        return hidden[:, -rollout.mask.shape[1] :]


def split_model(model: PreTrainedModel) -> SplitModel | None:
    """Backbone and head of a model, or None where its logits are made in another way.

    Whether they are is not read off the architecture's name but tried out: on a few tokens the parts must
    give the model's own logits.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    # A head that is more than a linear map (an adapter on it, say) can agree on the trial by chance of its
    # initialisation.
    if backbone is model or type(head) is not nn.Linear:
        return None
    split = SplitModel(backbone, head, getattr(model.config, "final_logit_softcapping", None))
    return split if _parts_agree(model, split) else None


def model_inputs(rollout: Rollout) -> dict[str, Tensor | bool]:
    """Arguments of a model's forward pass; the last token predicts nothing scored, so it is not fed."""
    return {
        "input_ids": rollout.tokens[:, :-1],
        "attention_mask": rollout.attention_mask[:, :-1].long(),
        "position_ids": rollout.position_ids[:, :-1],
        "use_cache": False,
    }


@torch.no_grad()
def _parts_agree(model: PreTrainedModel, split: SplitModel) -> bool:
    tokens = torch.arange(PROBE_LENGTH + 1, device=model.device)[None] % split.head.out_features
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
