"""Trial: distillation of a pruned SmolLM2 in TRL's trainer, with its own loss and with the adapter's default.

`python replication/notes/trl_distillation.py SEED ...` prints a line per seed and loss: seconds of training,
and the KL to the teacher on held-out questions before and after. `make runs/models/smollm2/config.json` makes
the teacher.
"""

import json
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer

from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.estimators import RaoBlackwell
from lit_klrb.integrations.trl import with_kl_estimator
from lit_klrb.models.backbones import with_layers
from lit_klrb.rollouts.scoring import Scorer

MODEL = "runs/models/smollm2"
QUESTIONS = Path(__file__).parents[2] / "configs/chat/questions"
# The student's layers of the 30.
LAYERS = [layer for layer in range(30) if layer not in (10, 20)]
TOKENS = 16


def questions(name: str) -> list[str]:
    """The prompts of a file, as the model's template writes them."""
    rows = [json.loads(line)["prompt"] for line in (QUESTIONS / f"{name}.jsonl").read_text().splitlines()]
    return [f"<|im_start|>user\n{row}<|im_end|>\n<|im_start|>assistant\n" for row in rows]


@torch.no_grad()
def kl(
    student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[float, float]:
    """KL(student‖teacher) in nats per answer on the held-out questions, and its standard error."""
    prompts = tokenizer(questions("validation"), return_tensors="pt", padding=True, padding_side="left")
    rollout = generate_completions(
        student,
        prompts.input_ids,
        prompts.attention_mask.bool(),
        Sampling(4, TOKENS, 1.0),
        seed=0,
        ends=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    scorer = Scorer(student, teacher, 1.0)
    stats = scorer.stats(rollout, scorer.reference_states(rollout))
    means = RaoBlackwell().value(stats, rollout.mask).view(len(prompts.input_ids), -1).mean(1)
    return means.mean().item(), means.std().item() / len(means) ** 0.5


def train(seed: int, *, adapter: bool) -> dict[str, Any]:
    """One run of 16 steps of 8 questions."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    teacher = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    student = with_layers(teacher, LAYERS)
    before = kl(student, teacher, tokenizer)
    rows = random.Random(seed).sample(questions("train"), 128)
    with tempfile.TemporaryDirectory() as folder:
        arguments = DistillationConfig(
            output_dir=folder, use_cpu=True, bf16=True, seed=seed, learning_rate=1e-4, beta=1.0, max_steps=16,
            per_device_train_batch_size=8, max_completion_length=TOKENS, gradient_checkpointing=False,
            report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=16,
        )  # fmt: skip
        kind = with_kl_estimator(DistillationTrainer) if adapter else DistillationTrainer
        trainer = kind(
            model=student,
            teacher_model=teacher,
            args=arguments,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": rows}),
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    after = kl(student, teacher, tokenizer)
    return {"seed": seed, "adapter": adapter, "seconds": seconds, "before": before, "after": after}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for number in map(int, sys.argv[1:]):
        for choice in (False, True):
            print(json.dumps(train(number, adapter=choice)), flush=True)
