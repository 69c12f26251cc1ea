"""Modules and data modules that do not match are refused in one line."""

import pytest
from single_steps import attached

from lit_klrb.data.modules import PreferenceDataModule
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwell


def test_pairs_need_a_module_that_makes_them(chain, tmp_path):
    module, _ = attached(chain, tmp_path, RaoBlackwell())
    data = PreferenceDataModule(train_size=4, eval_size=4)
    data.trainer = module.trainer
    with pytest.raises(ConfigurationError, match="provides preferences, but RLOOModule needs prompts"):
        data.setup("fit")
    data.setup("validate")
    assert len(data.val_dataloader()) == 1


def test_a_tokenizer_is_trained_on_reviews_only(chain, tmp_path, capsys):
    data = ["--data", "PromptDataModule", "--data.train_size", "8", "--data.eval_size", "4"]
    argv = ["--model.vocab_size", "300", *data]
    assert chain.run("fit", "sft", *argv, run=tmp_path) == 2
    assert "data: PromptDataModule provides prompts, but SFTModule needs texts" in capsys.readouterr().err
