import lightning as L

from lit_klrb.run.lightning_internals import trainer_of


def test_a_module_knows_its_trainer_once_it_is_attached():
    module = L.LightningModule()
    assert trainer_of(module) is None
    module.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert trainer_of(module) is module.trainer
