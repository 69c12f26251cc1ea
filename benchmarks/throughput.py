"""Throughput of a run and the shares of its stages."""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import lightning as L

from lit_klrb.studies.base import require_rollouts
from replication.studies.model_pairs import now

UPDATE = "update"
# The stages that are methods of the pair of models, and those of the module
STAGES = {"sample": "generate", "score": "statistics", "rewards": "reward"}, {"weigh": "statistics"}


@final
class RolloutThroughput(L.Callback):
    """Logs completion tokens per second and shares of the training time, once per rollout.

    `throughput/rollout_tokens_per_s` is the number of sampled tokens divided by the time of sampling,
    `throughput/update_tokens_per_s` the number of tokens in all training steps on the rollout divided by the
    time of these steps. `throughput/share_*` are shares of the total time: generate (sampling), statistics
    (policy and reference on the completions), reward, and update (forward, backward, optimizer). With this
    monitor, metrics of repeated runs are not identical, as times vary.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stages: dict[str, float] = {}
        self._steps = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without rollouts, and a command that does not train."""
        require_rollouts(self, trainer, pl_module, stage)

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Take the time of each stage from now on."""
        for owner, stages in zip((pl_module.pair, pl_module), STAGES, strict=True):
            for name, stage in stages.items():
                setattr(owner, name, partial(self._timed, getattr(owner, name), stage))

    def _timed(self, method: Callable[..., Any], stage: str, *args: Any, **settings: Any) -> Any:
        start = now()
        result = method(*args, **settings)
        self._stages[stage] = self._stages.get(stage, 0.0) + now() - start
        return result

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start timing, and discard stages since the last step, which belong to an evaluation."""
        self._stages = {}
        self._start = now()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop timing; log after the last step on a rollout."""
        step_seconds, stages = now() - self._start, self._stages
        stages[UPDATE] = step_seconds - sum(stages.values())
        for stage, seconds in stages.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
        self._steps += 1
        if (batch_idx + 1) % pl_module.steps_per_batch:
            return
        whole = sum(self._seconds.values())
        tokens = int(pl_module.experience.rollout.mask.sum())
        metrics = {f"share_{stage}": seconds / whole for stage, seconds in self._seconds.items()}
        if "generate" in self._seconds:  # missing if the run was resumed between the steps on a rollout
            metrics["rollout_tokens_per_s"] = tokens / self._seconds["generate"]
        passes = self._steps / pl_module.steps_per_batch * pl_module.inner_epochs
        metrics["update_tokens_per_s"] = tokens * passes / self._seconds[UPDATE]
        for logger in trainer.loggers:
            logger.log_metrics({f"throughput/{k}": v for k, v in metrics.items()}, trainer.global_step - 1)
        self._seconds, self._steps = {}, 0
