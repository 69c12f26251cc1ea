"""How fast a run is, and where its time goes."""

from typing import Any

import lightning as L

from lit_klrb.modules.stopwatch import now
from lit_klrb.studies.rollouts import RolloutCallback

UPDATE = "update"


class RolloutThroughput(RolloutCallback):
    """Logs, once for every rollout, completion tokens a second and the shares of its time.

    `throughput/rollout_tokens_per_s` counts the sampled tokens against the time of sampling alone,
    `throughput/update_tokens_per_s` the tokens that all optimizer steps on the rollout went over against
    theirs. `throughput/share_*` are the parts of the whole: generate (sampling), statistics (what policy and
    reference say of the completions), reward, and update (forward, backward, optimizer). Times are what
    varies from run to run: with this monitor two runs' metrics are no longer equal to the byte.
    """

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Start the module's stopwatch."""
        super().setup(trainer, pl_module, stage)
        pl_module.stopwatch.running = True
        self._seconds, self._steps = 0.0, 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._start = now()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop it; after the last step of a rollout, log."""
        self._seconds += now() - self._start
        self._steps += 1
        if (batch_idx + 1) % pl_module.steps_per_batch:
            return
        seconds = pl_module.stopwatch.take()
        seconds[UPDATE] = self._seconds - sum(seconds.values())
        tokens = int(pl_module.experience.rollout.mask.sum())
        metrics = {f"share_{stage}": value / self._seconds for stage, value in seconds.items()}
        if "generate" in seconds:  # not if the run was resumed in the middle of the rollout
            metrics["rollout_tokens_per_s"] = tokens / seconds["generate"]
        passes = self._steps / pl_module.steps_per_batch * pl_module.inner_epochs
        metrics["update_tokens_per_s"] = tokens * passes / seconds[UPDATE]
        for logger in trainer.loggers:
            logger.log_metrics({f"throughput/{k}": v for k, v in metrics.items()}, trainer.global_step - 1)
        self._seconds, self._steps = 0.0, 0
