"""RLOO: REINFORCE with a leave-one-out baseline and a KL penalty whose estimator is plugged in."""

from dataclasses import dataclass
from typing import final

from lit_klrb.models import loading
from lit_klrb.modules.on_policy import OnPolicyModule


@final
@dataclass(kw_only=True, eq=False, repr=False)
class RLOOModule(OnPolicyModule):
    """Maximises E[reward] − beta · KL(policy‖reference) on completions sampled from the policy.

    Reference: Kool et al. (2019), "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al.
    (2024), arXiv:2402.14740.

    Example: one step from a model with new weights, rewarded for positive reviews.

        >>> from tempfile import TemporaryDirectory
        >>> from lightning import Trainer
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lit_klrb.callbacks import KLEstimatorCallback
        >>> from lit_klrb.data.modules import PromptDataModule
        >>> from lit_klrb.data.tokenizer import grammar_tokenizer
        >>> from lit_klrb.estimators import MonteCarlo
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> options |= {"enable_progress_bar": False, "enable_model_summary": False}
        >>> with TemporaryDirectory() as folder:
        ...     tokenizer = grammar_tokenizer()
        ...     config = GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_embd=32, n_head=2, n_positions=64)
        ...     for part in (tokenizer, GPT2LMHeadModel(config)):
        ...         _ = part.save_pretrained(folder)
        ...     module = RLOOModule(policy_path=folder, reference_path=folder, max_new_tokens=8)
        ...     penalty = KLEstimatorCallback(MonteCarlo(), beta=0.1)
        ...     trainer = Trainer(max_steps=1, limit_val_batches=0, callbacks=[penalty], **options)
        ...     trainer.fit(module, PromptDataModule(batch_size=4, train_size=16, eval_size=4))
        weights: policy float32, reference float32, computed in float32
        >>> trainer.global_step, trainer.callback_metrics["train/kl"].item()  # at the first step
        (1, 0.0)
    """

    reward_path: str | dict[str, float] = loading.GRAMMAR
