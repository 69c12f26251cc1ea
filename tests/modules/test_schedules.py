"""The schedules are those of transformers, without its import of peft, and nothing else sets a rate."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from lit_klrb.cli.main import main
from lit_klrb.errors import ConfigurationError
from lit_klrb.modules.schedules import rate_factor
from lit_klrb.run.options import check_training_options


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_and_states_are_those_of_transformers(schedule, warmup):
    def rates(make):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        scheduler, found = make(optimizer), []
        for _ in range(12):
            found.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return found, scheduler.state_dict()

    theirs = "constant_with_warmup" if schedule == "constant" else schedule
    share_of = partial(rate_factor, schedule=schedule, warmup_steps=warmup, max_steps=10)
    ours = rates(lambda optimizer: LambdaLR(optimizer, share_of))
    expected = rates(lambda optimizer: get_scheduler(theirs, optimizer, warmup, 10))
    assert ours[0] == pytest.approx(expected[0], abs=1e-15)
    assert ours[1].keys() == expected[1].keys()


def test_a_rate_that_a_callback_finds_is_refused(tmp_path, capsys):
    """The schedule returns to its own after one step, while the checkpoint names the one that was found."""
    argv = ["--config", "configs/demo/sft.yaml", "--trainer.default_root_dir", str(tmp_path / "run")]
    assert main(["fit", *argv, "--trainer.callbacks+=LearningRateFinder"]) == 2
    said = "callbacks: must have no LearningRateFinder and no BatchSizeFinder: the schedule would not keep"
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: trainer.{said}")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigurationError, match=f"^{said}"):
        check_training_options({"max_steps": 1, "callbacks": [BatchSizeFinder()]})
