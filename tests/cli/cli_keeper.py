"""A callback that the tests' subprocesses find by import path."""

from pathlib import Path

import lightning as L
import torch

from lit_klrb.distributed import whole


class GradientKeeper(L.Callback):
    """Saves the gradients of the first optimizer steps, before clipping, and the rollout of each process."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        folder, step = Path(trainer.default_root_dir), trainer.global_step
        gradients = {k: whole(p.grad) for k, p in pl_module.named_parameters() if p.grad is not None}
        if trainer.is_global_zero:
            torch.save(gradients, folder / f"gradients_{step}.pt")
            held = sum(getattr(p, "to_local", p.detach)().numel() for p in pl_module.parameters())
            torch.save(held, folder / f"held_{step}.pt")
        if getattr(pl_module, "experience", None) is not None:
            kept = pl_module.experience.rollout.completions, torch.stack(pl_module.experience.weights[:2], -1)
            torch.save(kept, folder / f"rollout_{step}_{trainer.global_rank}.pt")
            if pl_module.kl_estimator.token_values_predict is not None:
                table = pl_module.experience.token_values
                torch.save(table, folder / f"token_values_{step}_{trainer.global_rank}.pt")
