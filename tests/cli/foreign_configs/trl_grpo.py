"""A training script in the style of TRL's documentation."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

BETA = 0.04


def reward_unique(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


arguments = GRPOConfig(output_dir="out", beta=BETA, loss_type="dr_grpo", scale_rewards=False)
trainer = GRPOTrainer(
    model="model",
    reward_funcs=reward_unique,
    args=arguments,
    train_dataset=load_dataset("prompts", split="train"),
)
trainer.train()
