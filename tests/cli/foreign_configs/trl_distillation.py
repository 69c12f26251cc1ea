"""A distillation script in the style of TRL's documentation."""

from trl import DistillationConfig, DistillationTrainer

trainer = DistillationTrainer(model="student", teacher_model="teacher", args=DistillationConfig(beta=1.0))
trainer.train()
