"""How fast a run is, and where its time goes."""

from typing import Any, final

import lightning as L

from lit_klrb.modules.stopwatch import now
from lit_klrb.studies.rollouts import require_rollouts

UPDATE = "update"


@final
class RolloutThroughput(L.Callback):
    """Logs completion tokens per second and the shares of the time, once per rollout.

    `throughput/rollout_tokens_per_s` is the number of sampled tokens divided by the time of sampling,
    `throughput/update_tokens_per_s` the number of tokens in all training steps on the rollout divided by the
    time of these steps. `throughput/share_*` are shares of the whole time: generate (sampling), statistics
    (policy and reference on the completions), reward, and update (forward, backward, optimizer). Times differ
    from run to run, so with this monitor the metrics of two runs are no longer equal to the byte.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._steps = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without rollouts, and a command that does not train."""
        require_rollouts(self, trainer, pl_module, stage)

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start the module's stopwatch."""
        pl_module.stopwatch.running = True

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock; what the stopwatch counted since the last step was an evaluation's."""
        pl_module.stopwatch.take()
        self._start = now()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock; after the last step of a rollout, log."""
        step_seconds, stages = now() - self._start, pl_module.stopwatch.take()
        stages[UPDATE] = step_seconds - sum(stages.values())
        for stage, seconds in stages.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
        self._steps += 1
        if (batch_idx + 1) % pl_module.steps_per_batch == 0:
            self._log(trainer, pl_module)
            self._seconds, self._steps = {}, 0

    def _log(self, trainer: L.Trainer, module: Any) -> None:
        whole = sum(self._seconds.values())
        tokens = int(module.experience.rollout.mask.sum())
        metrics = {f"share_{stage}": seconds / whole for stage, seconds in self._seconds.items()}
        if "generate" in self._seconds:  # not if the run was resumed between the steps of the rollout
            metrics["rollout_tokens_per_s"] = tokens / self._seconds["generate"]
        passes = self._steps / module.steps_per_batch * module.inner_epochs
        metrics["update_tokens_per_s"] = tokens * passes / self._seconds[UPDATE]
        for logger in trainer.loggers:
            logger.log_metrics({f"throughput/{k}": v for k, v in metrics.items()}, trainer.global_step - 1)
