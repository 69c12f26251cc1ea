"""Modules in a user's own trainer, without the command line."""

import pytest
import torch
from lightning import Trainer

from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.cli import error_translation
from lit_klrb.data.modules import PreferenceDataModule, PromptDataModule, TextDataModule
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwell
from lit_klrb.modules import DPOModule, RLOOModule, SFTModule

SIZES = {"batch_size": 4, "train_size": 16, "eval_size": 4}


@pytest.fixture(autouse=True)
def quiet():
    error_translation.quiet()


def make_trainer(tmp_path, *callbacks, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    rhythm = {"max_steps": 2, "val_check_interval": 2, "check_val_every_n_epoch": None}
    return Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **{**quiet, **rhythm, **settings},
    )


@pytest.mark.parametrize(
    ("stage", "kind", "data"),
    [
        ("sft", SFTModule, TextDataModule),
        ("dpo", DPOModule, PreferenceDataModule),
        ("rloo", RLOOModule, PromptDataModule),
    ],
)
def test_a_module_loaded_from_a_checkpoint_is_evaluated_and_trained_on(chain, tmp_path, stage, kind, data):
    saved = torch.load(chain.checkpoint(stage), weights_only=True)["state_dict"]
    module = kind.load_from_checkpoint(chain.checkpoint(stage))
    trainer = make_trainer(tmp_path, KLEstimatorCallback(RaoBlackwell(off_policy="clip"), 0.1))
    metrics = trainer.validate(module, datamodule=data(**SIZES), verbose=False)
    assert all(torch.equal(value, saved[key]) for key, value in module.state_dict().items())
    again = trainer.validate(module, datamodule=data(**SIZES), verbose=False)
    assert metrics == again
    trainer.fit(module, datamodule=data(**SIZES))
    assert trainer.global_step == 2
    assert any(not torch.equal(value, saved[key]) for key, value in module.state_dict().items())


def test_training_without_an_estimator_is_refused_and_evaluation_is_not(chain, tmp_path):
    module = RLOOModule(reference_path=chain.checkpoint("sft"), max_new_tokens=4)
    with pytest.raises(ConfigurationError, match="RLOOModule needs a KLEstimatorCallback"):
        make_trainer(tmp_path).fit(module, datamodule=PromptDataModule(**SIZES))
    make_trainer(tmp_path).validate(module, datamodule=PromptDataModule(**SIZES), verbose=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": -1, "max_epochs": 1}, "max_steps: must be at least 1: training data are infinite"),
        ({"limit_train_batches": 2}, "limit_train_batches: must be null or 1.0, .*, got 2"),
        ({"overfit_batches": 0.5}, "limit_train_batches: must be null or 1.0, .*, got 0.5"),
        ({"limit_train_batches": 1}, "limit_train_batches: must be null or 1.0, .*, got 1"),
        ({"gradient_clip_val": -1}, "gradient_clip_val: must be null, or finite and 0 or larger, got -1"),
        ({"max_epochs": 3}, "max_epochs: must be null: .*, got 3"),
    ],
)
def test_infinite_data_need_a_number_of_steps(tmp_path, settings, message):
    module = SFTModule(policy_config={"model_type": "gpt2"})
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, **settings).fit(module, datamodule=TextDataModule(**SIZES))
