"""A run that was stopped goes on as if it had not been: the same weights and metrics, bit for bit."""

import csv
from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lit_klrb.cli import lightning as cli


class Stopped(Exception):
    """Stands for a kill."""


class StopAt(Callback):
    """Ends the run once so many batches have been trained on, or inside a validation."""

    def __init__(self, batches, in_validation=False):
        self.batches, self.in_validation, self.seen = batches, in_validation, 0

    def on_train_batch_end(self, *_):
        self.seen += 1
        if self.seen == self.batches and not self.in_validation:
            raise Stopped

    def on_validation_batch_start(self, trainer, *_):
        if self.in_validation and not trainer.sanity_checking and self.seen >= self.batches:
            raise Stopped


def curves(run):
    """Metric -> step -> value, later attempts on top of earlier ones."""
    found = {}
    for path in sorted(run.glob("metrics/attempt_*/metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and "/" in name:
                        found.setdefault(name, {})[int(row["step"])] = float(value)
    return found


def weights_of(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


EVERY_STEP = ["--checkpoint.every_n_train_steps", "1"]
FOUR_STEPS_A_ROLLOUT = ["--model.mini_batches", "2", "--trainer.max_steps", "10"]
CASES = {
    "adaptive beta": ("rloo", [*FOUR_STEPS_A_ROLLOUT, "--kl.target_kl", "0.1", "--kl.horizon", "20"]),
    "control variate": ("rloo", [*FOUR_STEPS_A_ROLLOUT, "--kl.estimator", "RaoBlackwellControlVariate"]),
    "accumulation": ("rloo", ["--trainer.accumulate_grad_batches", "2"]),
    "preferences": ("dpo", []),
    "dropout": (
        "sft",
        ["--model.policy_config.resid_pdrop", "0.2", "--trainer.val_check_interval", "3"],
    ),
    "reward model": ("reward", ["--model.classifier_config.resid_pdrop", "0.2"]),
}
# How many batches are trained on before the stop, and whether it comes in the validation after them.
CUTS = [
    *(("adaptive beta", batches, False) for batches in (2, 3, 4, 5, 6, 7, 9)),
    *(("adaptive beta", batches, True) for batches in (3, 6, 9)),
    *(("control variate", batches, False) for batches in (2, 5)),
    *(("accumulation", batches, False) for batches in (3, 4)),
    *(("preferences", batches, batches == 2) for batches in (2, 3)),
    *(("dropout", batches, batches == 3) for batches in (2, 3)),
    ("reward model", 3, True),
]


@pytest.fixture(scope="module")
def undisturbed(chain, tmp_path_factory):
    @cache
    def make(case):
        stage, extra = CASES[case]
        run = tmp_path_factory.mktemp("undisturbed")
        assert chain.run("fit", stage, *EVERY_STEP, *extra, run=run) == 0
        return run

    return make


@pytest.mark.parametrize(("case", "batches", "in_validation"), CUTS)
def test_a_stopped_run_ends_like_an_undisturbed_one(
    chain, tmp_path, monkeypatch, undisturbed, case, batches, in_validation
):
    stage, extra = CASES[case]
    expected, run = undisturbed(case), tmp_path / "run"
    original = cli.LitCLI.instantiate_trainer

    def with_a_stop(self, **kwargs):
        trainer = original(self, **kwargs)
        # After the checkpoint callback, which is always last: what it saved is on disk.
        trainer.callbacks.append(StopAt(batches, in_validation))
        return trainer

    with monkeypatch.context() as patched:
        patched.setattr(cli.LitCLI, "instantiate_trainer", with_a_stop)
        with pytest.raises(Stopped):
            chain.run("fit", stage, *EVERY_STEP, *extra, run=run)
    resume = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    assert chain.run("fit", stage, *EVERY_STEP, *extra, *resume, run=run) == 0
    first, other = weights_of(expected), weights_of(run)
    assert all(torch.equal(first[key], other[key]) for key in first)
    assert len(list(run.glob("metrics/attempt_*"))) == 2
    assert curves(run) == curves(expected)
    assert (run / "summary.json").read_text() == (expected / "summary.json").read_text()


@pytest.mark.parametrize(
    "extra",
    [
        ["--trainer.val_check_interval", "1"],
        ["--trainer.limit_val_batches", "0"],
        ["--trainer.num_sanity_val_steps", "0"],
        ["--trainer.log_every_n_steps", "4"],
    ],
    ids=" ".join,
)
def test_validation_and_logging_never_change_training(chain, tmp_path, extra):
    assert chain.run("fit", "rloo", *extra, run=tmp_path) == 0
    first, other = weights_of(chain.root / "rloo"), weights_of(tmp_path)
    assert all(torch.equal(first[key], other[key]) for key in first)
