"""A module with its trainer and one batch, for single training steps."""

from lightning import Trainer

from lit_klrb.data.modules import PromptDataModule
from lit_klrb.estimators import EstimatorMemory
from lit_klrb.modules import RLOOModule


def attached(chain, tmp_path, estimator, policy_path=None, kind=RLOOModule, **settings):
    """A module with its trainer, models built, ready for single steps."""
    module = kind(
        policy_path=policy_path or chain.checkpoint("dpo"),
        reference_path=chain.checkpoint("sft"),
        reward_path="grammar",
        max_new_tokens=8,
        completions_per_prompt=3,
        **settings,
    )
    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    data = PromptDataModule(batch_size=4, train_size=16, eval_size=4)
    trainer.strategy.connect(module)
    module.trainer = data.trainer = trainer
    module.beta = 0.3
    if module.uses_kl_estimator:
        module.memory = EstimatorMemory(estimator)
    module.configure_model()
    module.log = lambda *args, **kwargs: None
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    return module, batch
