"""What an estimator remembers, in the checkpoints of TRL's trainers."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from lit_klrb.errors import concerning, refusing
from lit_klrb.estimators import EstimatorMemory
from lit_klrb.files import write_atomically

NAME = "kl_memory.pt"
_KEY = "resume_from_checkpoint"


class MemoryKeeper(TrainerCallback):
    """Saves the memory in each checkpoint, if the estimator has any.

    Args:
        memory: The memory, equal in all processes.
    """

    def __init__(self, memory: EstimatorMemory) -> None:
        self.memory = memory

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state beside the weights, once."""
        if not (self.memory.remembers and state.is_world_process_zero):
            return
        content = io.BytesIO()
        torch.save(self.memory.state_dict(), content)
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        write_atomically(folder / NAME, content.getbuffer())


def load_memory(memory: EstimatorMemory, resume_from_checkpoint: str | bool | None, output_dir: str) -> None:
    """Restore the memory that belongs to a checkpoint."""
    last = resume_from_checkpoint is True
    folder = get_last_checkpoint(output_dir) if last else resume_from_checkpoint  # type: ignore[no-untyped-call]
    if not (folder and memory.remembers):
        return
    path, name = Path(str(folder), NAME), type(memory.estimator).__name__
    kinds = OSError, EOFError, RuntimeError, pickle.UnpicklingError
    with refusing(f"{path} with what {name} remembers cannot be read", *kinds, key=_KEY):
        state = torch.load(path, map_location="cpu", weights_only=True)
    with concerning(path, key=_KEY):
        memory.load_state_dict(state)
