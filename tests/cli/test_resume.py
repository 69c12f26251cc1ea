"""A stopped run that is resumed has the same weights and metrics as an uninterrupted one, bit for bit."""

import csv
import json
import shutil
from datetime import timedelta
from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from runs import assert_same_run, contents, differences, equal, trained, weights_of, with_callback

from lit_klrb.callbacks import RunCheckpoint
from lit_klrb.run.checkpoints import CheckpointFiles

EVERY_STEP = ["--checkpoint.every_n_train_steps", "1"]
FOUR_STEPS_A_ROLLOUT = ["--model.mini_batches", "2", "--trainer.max_steps", "10"]
CASES = {
    "adaptive beta": ("rloo", [*FOUR_STEPS_A_ROLLOUT, "--kl.target_kl", "0.1", "--kl.horizon", "20"]),
    "control variate": ("rloo", [*FOUR_STEPS_A_ROLLOUT, "--kl.estimator", "RaoBlackwellControlVariate"]),
    "token values": ("distill", ["--kl.estimator", "replication.to_come.RaoBlackwellTokenValues"]),
    "accumulation": (
        "rloo",
        ["--trainer.accumulate_grad_batches", "2", "--model.final_evaluation_completions", "3"],
    ),
    "moving reference": ("rloo", [*FOUR_STEPS_A_ROLLOUT, "--model.reference_update", "{decay: 0.5}"]),
    "preferences": ("dpo", []),
    "dropout": ("sft", ["--model.policy_config.resid_pdrop", "0.2", "--trainer.val_check_interval", "3"]),
    "bfloat16": ("rloo", ["--trainer.precision", "bf16-true"]),
    "end of an epoch": ("sft", ["--data.train_size", "16"]),  # after two batches of eight rows
    "reward model": ("reward", ["--model.classifier_config.resid_pdrop", "0.2"]),
}
# Number of batches before the stop, and whether it is in the validation after them.
CUTS = [
    # Each place within a rollout, which is trained on for four steps, and one in the last.
    *(("adaptive beta", batches, batches == 3) for batches in (3, 4, 9)),
    *(("control variate", batches, False) for batches in (2, 5)),
    ("token values", 3, False),
    *(("accumulation", batches, False) for batches in (3, 4)),
    # Before the reference moves for the first time, and after it: the copy has the step before's checkpoint
    *(("moving reference", batches, False) for batches in (5, 6)),
    *(("preferences", batches, batches == 2) for batches in (2, 3)),
    *(("dropout", batches, batches == 3) for batches in (2, 3)),
    ("bfloat16", 3, False),
    ("end of an epoch", 3, False),  # the checkpoint is that of the second batch
    ("reward model", 3, True),
]


class Copies(Callback):
    """Copies the run directory after each batch and at the start of each validation, as a kill leaves it."""

    def __init__(self, root):
        self.root, self.seen = root, 0

    def on_train_batch_end(self, *_):
        self.seen += 1
        self.copy(False)

    def on_validation_batch_start(self, trainer, *_):
        if not trainer.sanity_checking:
            self.copy(True)

    def copy(self, in_validation):
        target = self.root / f"{self.seen}{in_validation}"
        if not target.exists():
            shutil.copytree(self.root / "run", target)


@pytest.fixture(scope="module")
def undisturbed(chain, tmp_path_factory):
    @cache
    def make(case):
        stage, extra = CASES[case]
        root = tmp_path_factory.mktemp("undisturbed")
        with pytest.MonkeyPatch.context() as patched:
            # After the checkpoint callback, which is always last: its file is on disk.
            with_callback(patched, Copies(root), last=True)
            assert chain.run("fit", stage, *EVERY_STEP, *extra, run=root / "run") == 0
        return root

    return make


@pytest.mark.parametrize(("case", "batches", "in_validation"), CUTS)
def test_a_stopped_run_ends_like_an_undisturbed_one(chain, undisturbed, case, batches, in_validation):
    stage, extra = CASES[case]
    root = undisturbed(case)
    expected, run = root / "run", root / f"{batches}{in_validation}"
    resume = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    assert chain.run("fit", stage, *EVERY_STEP, *extra, *resume, run=run) == 0
    assert len(list(run.glob("metrics/attempt_*"))) == 2
    assert_same_run(expected, run)


CONSTANT = ["--model.schedule", "constant"]


@pytest.fixture(scope="module")
def halfway(chain, tmp_path_factory):
    """An RLOO run of constant schedule with a checkpoint in the middle, and its checkpoint at the end."""
    root = tmp_path_factory.mktemp("halfway")
    keep = ["--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.every_n_train_steps", "3"]
    keep += ["--trainer.callbacks.save_top_k", "-1", "--trainer.callbacks.filename", "{step}"]
    keep += ["--trainer.callbacks.dirpath", str(root)]
    assert chain.run("fit", "rloo", *CONSTANT, *keep, run=root / "run") == 0
    return root


def resumed(chain, halfway, run, *extra, which="step=3.ckpt"):
    return chain.run("fit", "rloo", *CONSTANT, *extra, "--ckpt_path", str(halfway / which), run=run)


# The fitted control variate of KLMonitor warns, as one of so few completions often dominates.
@pytest.mark.filterwarnings("ignore:one of .* completions has")
def test_what_may_differ_changes_nothing_that_is_trained(chain, halfway, tmp_path):
    """Another directory, other intervals of checkpoints, a progress bar, loggers and monitors."""
    other = ["--checkpoint.every_n_train_steps", "2", "--trainer.enable_progress_bar", "true"]
    other += ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "mine")]
    other += ["--trainer.callbacks+=KLMonitor", "--trainer.enable_model_summary", "true"]
    other += ["--trainer.max_time", "01:00:00:00", "--trainer.log_every_n_steps", "2"]
    assert resumed(chain, halfway, tmp_path / "run", *other) == 0
    first, now = trained(halfway / "run"), trained(tmp_path / "run")
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "experience"):
        assert list(differences(first[key], now[key])) == []


def test_a_run_may_get_more_steps_where_nothing_depends_on_their_number(chain, halfway, tmp_path):
    more = ["--trainer.max_steps", "8"]
    assert chain.run("fit", "rloo", *CONSTANT, *more, run=tmp_path / "whole") == 0
    shutil.copytree(halfway / "run", tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert chain.run("fit", "rloo", *CONSTANT, *more, "--ckpt_path", str(last), run=tmp_path / "run") == 0
    assert list(differences(trained(tmp_path / "whole"), trained(tmp_path / "run"))) == []
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "run")]
    assert summaries[0] == summaries[1]
    assert summaries[0]["steps"] == 8


@pytest.mark.parametrize("interval", ["3", "4"])  # the last evaluation is within the fit, or after it
def test_a_finished_run_that_is_resumed_keeps_its_metrics(chain, tmp_path, interval):
    extra = ["--trainer.val_check_interval", interval]
    assert chain.run("fit", "rloo", *extra, run=tmp_path) == 0
    summary = (tmp_path / "summary.json").read_bytes()
    resume = ["--ckpt_path", str(tmp_path / "checkpoints" / "last.ckpt")]
    assert chain.run("fit", "rloo", *extra, *resume, run=tmp_path) == 0
    files = [tmp_path / "metrics" / f"attempt_{number}" / "metrics.csv" for number in (0, 1)]
    before, again = (list(csv.DictReader(file.read_text().splitlines())) for file in files)
    assert again == [{name: before[-1][name] for name in again[0]}]
    assert (again[0]["epoch"], again[0]["step"]) == ("0", "6")
    assert (tmp_path / "summary.json").read_bytes() == summary


def test_a_run_is_not_resumed_into_the_directory_of_another(chain, halfway, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(chain.root / "dpo", other)
    before = contents(other)
    assert resumed(chain, halfway, other) == 2
    assert f"{other} belongs to another run than ckpt_path" in capsys.readouterr().err
    assert contents(other) == before
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_reference_that_was_trained_anew_is_noticed(chain, tmp_path, capsys):
    reference, run = tmp_path / "reference.ckpt", tmp_path / "run"
    shutil.copy(chain.checkpoint("sft"), reference)
    path = ["--model.reference_path", str(reference)]
    assert chain.run("fit", "rloo", *path, *EVERY_STEP, run=run) == 0
    shutil.copy(chain.checkpoint("dpo"), reference)
    resume = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    assert chain.run("fit", "rloo", *path, *EVERY_STEP, *resume, run=run) == 2
    assert f"reference_path: {reference} has changed since the run of" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_resumes(chain, tmp_path, capsys):
    run = tmp_path / "run"
    assert chain.run("fit", "rloo", *EVERY_STEP, run=run) == 0
    last, previous = (run / "checkpoints" / name for name in ("last.ckpt", "previous.ckpt"))
    raw = bytearray(last.read_bytes())
    raw[len(raw) // 2] ^= 1
    last.write_bytes(bytes(raw))
    for key in ("--ckpt_path", "--model.policy_path", "--model.reference_path"):
        assert chain.run("fit", "rloo", *EVERY_STEP, key, str(last), run=tmp_path / "new") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{last}: damaged: " in line
        assert line.endswith(f"; the previous one is intact: {previous}")
    assert chain.run("fit", "rloo", *EVERY_STEP, "--ckpt_path", str(previous), run=run) == 0
    assert_same_run(chain.root / "rloo", run)


@pytest.mark.parametrize("stage", ["rloo", "sft"])
def test_checkpoints_by_time_change_nothing(chain, tmp_path, stage):
    always = ["--checkpoint.train_time_interval", "0:00:00.000001"]
    assert chain.run("fit", stage, *always, run=tmp_path) == 0
    assert_same_run(chain.root / stage, tmp_path)
    saved = [torch.load(path, weights_only=True)["global_step"] for path in tmp_path.glob("checkpoints/*")]
    assert sorted(saved) == [5, 6]


class Minute(Callback):
    """Lets a minute pass before a batch, or before each."""

    def __init__(self, batch):
        self.batch, self.now = batch, 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.now += 60.0 * (self.batch in (batch_idx, None))

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(("batch", "first"), [(2, (1, 2, 2)), (3, (2, 4, 4))])
def test_checkpoints_by_time_are_never_within_an_optimizer_step(chain, tmp_path, monkeypatch, batch, first):
    parts = ["--trainer.accumulate_grad_batches", "2", "--trainer.max_steps", "3"]
    saved, clock = [], Minute(batch)
    original = CheckpointFiles.save_checkpoint

    def noted(self, checkpoint, path, **keywords):
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        saved.append((checkpoint["global_step"], batches["ready"], batches["completed"]))
        original(self, checkpoint, path, **keywords)

    with_callback(monkeypatch, clock)
    monkeypatch.setattr("lightning.pytorch.callbacks.model_checkpoint.time", clock)
    monkeypatch.setattr(CheckpointFiles, "save_checkpoint", noted)
    assert chain.run("fit", "rloo", *parts, run=tmp_path) == 0
    assert saved == [first, (3, 6, 6)]


@pytest.mark.parametrize(("seconds", "steps"), [(2.0, [1, 2, 3, 4, 5, 6]), (6.0, [1, 3, 5, 6])])
def test_saving_takes_a_twentieth_of_the_time_at_most(chain, tmp_path, monkeypatch, seconds, steps):
    saved, clock = [], Minute(None)

    def slow(self, checkpoint, path, **keywords):
        saved.append(checkpoint["global_step"])
        clock.now += seconds

    with_callback(monkeypatch, clock)
    for module in ("lightning.pytorch.callbacks.model_checkpoint", "lit_klrb.callbacks.checkpoint"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr(CheckpointFiles, "save_checkpoint", slow)
    assert chain.run("fit", "sft", run=tmp_path) == 0
    assert saved == steps


def test_a_minute_is_all_that_a_kill_may_cost(chain):
    default = RunCheckpoint(dirpath=chain.root)
    assert default._train_time_interval == timedelta(minutes=1)
    by_steps = RunCheckpoint(dirpath=chain.root, every_n_train_steps=3)
    assert by_steps._train_time_interval is None
    assert default.state_key == by_steps.state_key


@pytest.mark.parametrize(
    "extra",
    [
        ["--trainer.val_check_interval", "1", "--trainer.log_every_n_steps", "4"],
        ["--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0"],
    ],
    ids=" ".join,
)
def test_validation_and_logging_never_change_training(chain, tmp_path, extra):
    assert chain.run("fit", "rloo", *extra, run=tmp_path) == 0
    assert equal(weights_of(chain.root / "rloo"), weights_of(tmp_path))
