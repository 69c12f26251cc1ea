"""The gradient of a step does not depend on how its rows are split into accumulated batches and processes."""

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from lightning import Callback, Trainer
from runs import in_processes
from written import save, write_rows

from lit_klrb.data.modules import (
    LabelledTextDataModule,
    PreferenceDataModule,
    PromptDataModule,
    TextDataModule,
    TextPairDataModule,
)
from lit_klrb.estimators import EstimatorMemory, MonteCarlo
from lit_klrb.models.loading import CLASSIFIER, fresh_model
from lit_klrb.modules import (
    DistillModule,
    DPOModule,
    PairwiseRewardModule,
    RewardModule,
    RLOOModule,
    SFTModule,
)

SIZES = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 128}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CONFIG = {"model_type": "gpt2", **SIZES, **NO_DROPOUT}
# Rows of unequal length
ANSWERS = ["yes", "no, not as far as I can see, and I looked for a while"]
ROWS = [
    {
        "text": f"{number} {answer}",
        "label": number % 2,
        "prompt": f"Is {number}{' really' * (number % 3)} even? ",
        "completion": answer,
        "chosen": answer,
        "rejected": f"perhaps{' so' * (number % 5)}",
    }
    for number in range(40)
    for answer in [ANSWERS[number % 2]]
]
COLUMNS = {
    SFTModule: ("prompt", "completion"),
    RewardModule: ("text", "label"),
    PairwiseRewardModule: ("prompt", "chosen", "rejected"),
    DPOModule: ("prompt", "chosen", "rejected"),
    RLOOModule: ("prompt",),
    DistillModule: ("prompt",),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two policies, a classifier, and a file for each module."""
    root = tmp_path_factory.mktemp("splits")
    for seed, (name, settings) in enumerate({"p": {}, "q": {}, "classifier": {"role": CLASSIFIER}}.items()):
        model = fresh_model(CONFIG, chat_tokenizer(), seed=seed, **settings)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)  # differences between rows that can be seen
        save(root / name, model, chat_tokenizer())
    for kind, columns in COLUMNS.items():
        rows = ({column: row[column] for column in columns} for row in ROWS)
        write_rows(root / f"{kind.__name__}.jsonl", rows)
    return root


def length(texts):
    """A reward."""
    return [float(len(text) % 7) for text in texts]


def make(kind, root):
    p, q, classifier = (str(root / name) for name in ("p", "q", "classifier"))
    sampled = {"policy_path": p, "reference_path": q, "max_new_tokens": 6}
    if kind is SFTModule:
        return kind(policy_path=p), TextDataModule
    if kind in (RewardModule, PairwiseRewardModule):
        data = LabelledTextDataModule if kind is RewardModule else TextPairDataModule
        return kind(classifier_path=classifier), data
    if kind is DPOModule:
        return kind(**sampled, reward_path=classifier, beta=0.5), PreferenceDataModule
    rewarded = {"reward_path": classifier} if kind is RLOOModule else {}
    completions = {"completions_per_prompt": 3}
    module = kind(**sampled, **completions, **rewarded, seed=3)
    module.memory, module.beta = EstimatorMemory(MonteCarlo()), 0.5
    return module, PromptDataModule


class Gradient(Callback):
    """Writes the gradient before the first optimizer step."""

    def __init__(self, file):
        self.file = file

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        parameters = [p for p in pl_module.parameters() if p.grad is not None]
        if trainer.is_global_zero:
            torch.save(torch.cat([parameter.grad.flatten() for parameter in parameters]), self.file)


def gradient(kind, root, path, parts, processes=1):
    """The gradient of the first step on the same rows in equal parts."""
    module, data = make(kind, root)
    source = str(root / f"{kind.__name__}.jsonl")
    given = {"preferences": source} if kind is DPOModule else {}
    # A module that samples splits its own rollout; the others get a batch for each part
    size = 4 // processes if kind in (RLOOModule, DistillModule) else 4 // parts // processes
    settings = {"source": source, "train_size": 0, "eval_size": 2, "batch_size": size, **given}

    def fit(_):
        trainer = Trainer(
            max_steps=1,
            accumulate_grad_batches=parts,
            accelerator="cpu",
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
            use_distributed_sampler=False,
            callbacks=[Gradient(path / "gradient.pt")],
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=path,
        )
        trainer.fit(module, data(**settings))
        return 0

    fit(()) if processes == 1 else in_processes(processes, fit, (), path / "log")
    return torch.load(path / "gradient.pt")


# Lightning's own, about torch's trees and about models without dropout
@pytest.mark.filterwarnings(
    "ignore:.isinstance:FutureWarning",
    "ignore:Found .* eval mode",
)
@pytest.mark.parametrize("kind", COLUMNS)
def test_gradients_are_equal_however_rows_are_split(kind, root, tmp_path):
    """mlx-lm#1413, trl#5619, trl#6024, ms-swift#10117: the last in two processes with two batches each."""
    whole, *splits = (gradient(kind, root, tmp_path, *by) for by in ((1,), (2,), (4,), (1, 2), (2, 2)))
    assert whole.norm() > 1e-3
    for split in splits:
        assert (split - whole).norm() < 1e-5 * whole.norm()
