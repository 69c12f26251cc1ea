"""The KL in the other direction, KL(reference‖policy), on completions of the reference."""

from typing import Any, final

import lightning as L
import torch
from torch import Tensor

from lit_klrb import schema
from lit_klrb.callbacks.monitors import EvaluationMonitor
from lit_klrb.estimators import RaoBlackwell
from lit_klrb.functional import clustered_mean
from lit_klrb.modules.regularised import Evaluation, RegularisedModule
from lit_klrb.seeding import derive_seed


@final
class ReverseKLMonitor(EvaluationMonitor):
    """Logs KL(reference‖policy) as `reverse_kl` with its standard error, in nats per sequence.

    KL(policy‖reference), which training penalises, is large where the policy writes what the reference would
    not; this one is large where the policy no longer writes what the reference would. It is the
    Rao-Blackwell estimate on as many completions of the evaluation's prompts, sampled from the reference, and
    costs about as much again as the evaluation. A reference that is frozen samples the same ones each time.
    """

    needs_reference = True

    def __init__(self) -> None:
        super().__init__()
        self._values: list[Tensor] = []

    @torch.no_grad()
    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Estimate the KL on the reference's completions of the batch."""
        super().on_validation_batch_end(trainer, pl_module, outputs)
        # Completions of the reference, after the prompts that it reads
        seed = derive_seed(pl_module.evaluation_seed, "evaluation of the reference", batch_idx)
        sampling = pl_module.evaluation_sampling
        rollout = pl_module.pair.sample(batch, sampling, seed=seed, of_reference=True)
        read = rollout.after(batch["tokens"], batch["attention_mask"])
        stats = pl_module.pair.scorer.reverse_stats(rollout, read)
        values = RaoBlackwell().value(stats, rollout.mask)
        self._values.append(values.view(-1, sampling.completions_per_prompt))

    def report(
        self, trainer: L.Trainer, pl_module: RegularisedModule, evaluations: list[Evaluation], stage: str
    ) -> None:
        """Log the mean with its standard error."""
        mean, error = clustered_mean(torch.cat(self._values))
        self._values.clear()
        pl_module.log_evaluation(
            stage, {schema.REVERSE_KL: mean.item(), f"{schema.REVERSE_KL}_se": error.item()}
        )
