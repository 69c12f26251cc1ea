"""TRL's served distillation with an estimator of this package, beside the same with the teacher in memory.

`python -m benchmarks.engines.trl_served FOLDER ADDRESS` takes the folder of a teacher and the address of the
server that has it, and compares the gradients of one batch of completions, and of a short training's steps.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import datasets
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.estimators import RaoBlackwellTopK
from lit_klrb.integrations.trl import with_kl_estimator

KS = (1, 5, 20, 64)
# Relative difference of gradients, by the rounding of a server's log-probabilities
LIMIT = 1e-4
STEPS, BATCH = 3, 8


def student_of(folder: Path) -> PreTrainedModel:
    """The teacher's weights with noise, in float32 without dropout."""
    student: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in student.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return student


def trainer_of(folder: Path, output: str, k: int, address: str | None) -> Any:
    """A trainer whose teacher is the server's, or without an address that of the folder."""
    prompts = [f"The {noun} was" for noun in ("film", "cast", "plot", "drama")] * BATCH
    given: dict[str, Any] = {
        "output_dir": output, "use_cpu": True, "report_to": [], "bf16": False, "seed": 0,
        "max_completion_length": 16, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1,
        "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        "learning_rate": 1e-3,
    }  # fmt: skip
    kind, config, teacher = DistillationTrainer, DistillationConfig, {"teacher_model": None}
    if address is None:
        teacher = {"teacher_model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)}
    else:
        kind, config, teacher = ServerDistillationTrainer, ServerDistillationConfig, {}
        given["teacher_model_server_url"] = address
    return with_kl_estimator(kind)(
        model=student_of(folder),
        args=config(**given),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        kl_estimator=RaoBlackwellTopK(k=k, support="reference", baseline=None),
        **teacher,
    )


def gradient_of(trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    """The gradient of the trainer's loss on completions that are given."""
    parent = type(trainer).__mro__[1]
    own, parent._generate_and_score_completions = parent._generate_and_score_completions, lambda *_: batch
    trainer.state.max_steps, trainer.current_gradient_accumulation_steps = 1, 1
    policy = trainer.model.train()
    try:
        scored = trainer._generate_and_score_completions(None)
    finally:
        parent._generate_and_score_completions = own
    loss = trainer.compute_loss(policy, scored)
    gradients = torch.autograd.grad(loss, [*policy.parameters()], materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def batch_of(folder: Path) -> dict[str, Tensor]:
    """Reviews of the demo's world, the first words of which are prompts."""
    tokenizer, grammar = AutoTokenizer.from_pretrained(folder), ReviewGrammar()
    rows = [tokenizer(review.text)["input_ids"] for review in grammar.reviews(64, seed=0)]
    tokens = torch.tensor([row[:12] for row in rows if len(row) >= 12][:BATCH])
    halves = {"prompt": tokens[:, :4], "completion": tokens[:, 4:]}
    return {
        f"{name}_{what}": values
        for name, ids in halves.items()
        for what, values in (("ids", ids), ("mask", torch.ones_like(ids)))
    }


def norms_of(trainer: Any) -> Tensor:
    """The norms of the gradients of a training, whose completions depend on the seed alone."""
    torch.manual_seed(0)
    trainer.train()
    return torch.tensor([row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row])


def main(folder: Path, address: str) -> int:
    """Print a line for each k; 1 if a gradient differs by more than rounding."""
    batch, worst = batch_of(folder), 0.0
    with tempfile.TemporaryDirectory() as output:
        for k in KS:
            memory, served = (trainer_of(folder, output, k, where) for where in (None, address))
            exact, ours = gradient_of(memory, batch), gradient_of(served, batch)
            worst = max(worst, difference := float((ours - exact).norm() / exact.norm()))
            print(f"TRL, a served teacher, k = {k}: gradient within {difference:.1e} of that in memory")
        exact, ours = norms_of(memory), norms_of(served)
    steps = float((ours / exact - 1).abs().max())
    print(f"TRL, a served teacher, {len(ours)} steps: norms of gradients within {steps:.1e}", flush=True)
    return int(max(worst, steps) > LIMIT)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
