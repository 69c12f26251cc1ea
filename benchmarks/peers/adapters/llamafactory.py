"""LLaMA-Factory: the KL to a reference in its ASFT loss; its PPO and KTO are TRL's."""

import os
from collections.abc import Iterator

from torch import Tensor

from ..importing import load
from ..setting import Setting

DISTRIBUTION = "llamafactory"
os.environ.setdefault("DISABLE_VERSION_CHECK", "1")


def settings() -> Iterator[Setting]:
    """The KL term of LLaMA-Factory, without the cross-entropy that it is added to."""
    module = load("llamafactory.train.trainer_utils", "llamafactory.model", "llamafactory.hparams")

    def loss(logits: Tensor, ref_logits: Tensor, labels: Tensor) -> Tensor:
        flat = (values.flatten(0, 1) for values in (logits, ref_logits))
        return 0.1 * module._kl_divergence(*flat, labels.flatten())

    yield Setting("use_asft_loss", {}, {}, "KL divergence", loss)
