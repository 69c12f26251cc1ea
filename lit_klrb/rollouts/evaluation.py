"""The common evaluation: completions with statistics and rewards, and when earlier ones are the same."""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.distributed import gather_rows
from lit_klrb.estimators import RaoBlackwell, RaoBlackwellTopK
from lit_klrb.functional import TokenStats
from lit_klrb.functional.tiled.blocks import COMPILE
from lit_klrb.models.adapters import adapter_settings
from lit_klrb.models.rollout import Rollout
from lit_klrb.models.sharding import is_sharded
from lit_klrb.rollouts.pair import Pair
from lit_klrb.run.cache import weights_digest
from lit_klrb.run.machine import versions


class Evaluation(NamedTuple):
    """Completions with their statistics and rewards.

    Args:
        rollout: K completions of each of P prompts, prompt-major.
        stats: Their token statistics under policy and reference, shape [P·K, T].
        rewards: Their rewards, shape [P·K].
        completions_per_prompt: K.
        current: Their statistics under a reference that has followed the policy; `stats` are under the first.
    """

    rollout: Rollout
    stats: TokenStats
    rewards: Tensor
    completions_per_prompt: int
    current: TokenStats | None = None

    def summary(self) -> dict[str, Tensor]:
        """Reward, Rao-Blackwell estimate of the KL (nats) and length (tokens) of each completion, [P, K].

        From a served teacher, which sends no more than its head, the KL is that of `RaoBlackwellTopK`.
        """
        mask = self.rollout.mask
        estimator = RaoBlackwellTopK() if self.stats.kl is None else RaoBlackwell()
        columns = {"reward": self.rewards, "kl": estimator.value(self.stats, mask), "length": mask.sum(1)}
        if self.current is not None:
            columns["kl_current"] = RaoBlackwell().value(self.current, mask)
        return {name: v.float().view(-1, self.completions_per_prompt) for name, v in columns.items()}

    def everyones(self, prompts: int) -> "Evaluation":
        """The completions of all processes, of which this one's are those of its first prompts."""
        count = self.completions_per_prompt

        def every(field: Tensor) -> Tensor:
            return gather_rows(field[: prompts * count])

        current = None if self.current is None else self.current.map(every)
        stats, rewards = self.stats.map(every), every(self.rewards)
        return Evaluation(self.rollout.map(every), stats, rewards, count, current)


def is_evaluation(stored: Any, rows: int) -> bool:
    """Whether cached values are completions with token statistics; may raise any exception if not."""
    rollout, stats = Rollout(*stored[0]), TokenStats(*stored[1])
    of_tokens = [field for field in (rollout.mask, rollout.logprobs, *stats) if field is not None]
    whole = rollout.tokens.shape == rollout.attention_mask.shape and len(rollout.tokens) == rows
    return whole and stats.kl is not None and {f.shape for f in of_tokens} == {rollout.completions.shape}


def start_key(pair: Pair, device: torch.device, precision: str) -> dict[str, Any] | None:
    """What completions and statistics of a pair depend on, besides prompts and seed: the cache's key.

    None where nothing is kept: code other than transformers' can change, and the last digits of a GPU do.
    """
    models = pair.policy, pair.reference
    known = all(type(model).__module__.startswith("transformers.models.") for model in models)
    if not known or pair.served or pair.by_teacher or is_sharded(pair.policy) or device.type != "cpu":
        return None
    return {
        "models": [[weights_digest(model), adapter_settings(model)] for model in models],
        "reference": [pair.second is None, pair.itself, pair.rows, pair.temperature],
        "ends": [pair.ends if pair.stop_at_eos else (), pair.tokenizer.pad_token_id],
        "numbers": [precision, torch.get_num_threads(), os.environ.get(COMPILE), versions()],
    }
