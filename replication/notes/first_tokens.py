"""How much of an answer's first token a student shares with the teacher of each context, before training.

`python replication/notes/first_tokens.py` prints for each context sum_v min(p(v), q(v)) with p
the student and q the teacher, the mean over the held-out questions, and the teacher's most probable first
token with both probabilities. `make runs/models/smollm2/config.json` makes the model.
"""

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).parents[2]
MODEL = "runs/models/smollm2"
TEMPERATURE = 0.7  # that of the plans


@torch.no_grad()
def first_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> Tensor:
    """Probabilities of the first token of an answer to each held-out question after some messages, [B, V]."""
    lines = (ROOT / "configs/chat/questions/validation.jsonl").read_text().splitlines()
    chats = [[*messages, {"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    given: Any = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    probs: Tensor = (model(**given).logits[:, -1].float() / TEMPERATURE).softmax(-1)
    return probs


def context_of(overrides: dict[str, Any]) -> list[dict[str, str]]:
    """The messages that a teacher reads before the question."""
    messages = [{"role": "system", "content": overrides["data.init_args.teacher_system_prompt"]}]
    for question, answer in overrides["data.init_args.teacher_examples"]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    student = first_token(model, tokenizer, [])
    for plan in ("directions", "contexts"):
        config = OmegaConf.load(ROOT / f"replication/configs/smollm2_context/{plan}.yaml")
        blocks: Any = OmegaConf.to_container(config.grid.blocks)
        for name, block in blocks.items():
            teacher = first_token(model, tokenizer, context_of(block["overrides"]))
            shared = torch.minimum(student, teacher).sum(1).mean()
            token = teacher.mean(0).argmax()
            of_teacher, of_student = teacher.mean(0)[token], student.mean(0)[token]
            print(
                f"{name}: shared {shared:.3f}; {tokenizer.decode(token)!r} {of_teacher:.2f}, {of_student:.1e}"
            )
