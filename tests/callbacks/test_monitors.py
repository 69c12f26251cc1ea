"""Monitors record the common evaluation without influence on training."""

import csv
import json

import pytest
import torch
from runs import equal, weights_of

from lit_klrb import schema
from lit_klrb.callbacks.monitors import by_position, together
from lit_klrb.functional import TokenStats
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.evaluation import Evaluation
from lit_klrb.run.directory import LOCK

# The fitted control variate warns about as few as eight completions.
pytestmark = pytest.mark.filterwarnings("ignore:one of")

MONITORS = [
    "--trainer.callbacks+=KLMonitor",
    *("--trainer.callbacks+=CompletionTable", "--trainer.callbacks.rows", "3"),
]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def monitored(chain, tmp_path_factory):
    run = tmp_path_factory.mktemp("monitored")
    assert chain.run("fit", "rloo", *MONITORS, run=run) == 0
    return run


def final(run):
    return json.loads((run / "summary.json").read_text())["final"]


def test_the_values_stand_beside_each_other(monitored):
    values = final(monitored)
    for name in ("k1", "k2", "k3", "cv", "cv_fitted", "ht", "rb"):
        assert values[f"kl_{name}_se"] >= 0
    assert values["kl_rb"] == pytest.approx(values["kl"], rel=1e-5)
    assert values["kl_rb_se"] == pytest.approx(values["kl_se"], rel=1e-5)
    assert values["kl_rb_per_token"] == pytest.approx(values["kl"] / values["length"], rel=1e-5)


def test_training_is_not_touched(chain, monitored):
    assert equal(weights_of(chain.root / "rloo"), weights_of(monitored))
    plain = final(chain.root / "rloo")
    assert {name: final(monitored)[name] for name in plain} == plain


def test_what_monitors_write_belongs_to_the_run(monitored):
    assert {path.name for path in monitored.iterdir()} <= {*schema.OWN, LOCK}


def test_the_kl_by_position_adds_up(monitored):
    for step in (0, 3, 6):
        rows = rows_of(monitored / "kl_by_position" / f"step_{step:06d}.csv")
        counts = [int(row["completions"]) for row in rows]
        assert counts == sorted(counts, reverse=True)
    total = sum(float(row["kl"]) * int(row["completions"]) for row in rows)
    assert total / counts[0] == pytest.approx(final(monitored)["kl"], rel=1e-4)


def test_completions_before_and_after(monitored):
    first, last = (rows_of(monitored / "completions" / f"step_{step:06d}.csv") for step in (0, 6))
    assert len(last) == 3
    assert [row["text"] for row in first] == [row["text_at_start"] for row in last]
    assert [row["reward"] for row in first] == [row["reward_at_start"] for row in last]


def test_a_resumed_run_remembers_the_start(chain, monitored, tmp_path):
    constant = [
        "--model.schedule",
        "constant",
    ]  # the only schedule that does not depend on the number of steps
    assert chain.run("fit", "rloo", *MONITORS, *constant, "--trainer.max_steps", "3", run=tmp_path) == 0
    resume = ["--ckpt_path", str(tmp_path / "checkpoints" / "last.ckpt")]
    schedule = [*constant, "--trainer.max_steps", "6"]
    assert chain.run("fit", "rloo", *MONITORS, *schedule, *resume, run=tmp_path) == 0
    expected, got = (rows_of(run / "completions" / "step_000006.csv") for run in (monitored, tmp_path))
    assert [row["text_at_start"] for row in got] == [row["text_at_start"] for row in expected]


def test_a_test_is_monitored_as_a_validation_is(chain, tmp_path, capsys):
    ckpt = ["--ckpt_path", chain.checkpoint("rloo")]
    assert chain.run("test", "rloo", *MONITORS, *ckpt, run=tmp_path) == 0
    assert "test/kl_rb_per_token" in capsys.readouterr().out
    table = rows_of(tmp_path / "completions" / "test.csv")
    assert [row["text_at_start"] for row in table] == [row["text"] for row in table]
    assert len(table) == 3
    # Never the name of a step of the run, whose directory may be the same.
    assert {path.stem for path in tmp_path.rglob("*.*")} == {"test"}


def test_a_prediction_is_not_monitored(chain, tmp_path, capsys):
    ckpt = ["--ckpt_path", chain.checkpoint("rloo")]
    assert chain.run("predict", "rloo", "--trainer.callbacks+=KLMonitor", *ckpt, run=tmp_path) == 2
    assert "KLMonitor needs an evaluation, but predict has none" in capsys.readouterr().err


def test_batches_of_different_lengths_are_put_together():
    def evaluation(width, value):
        mask = torch.ones(2, width, dtype=torch.bool)
        tokens = torch.full((2, width + 1), value)
        stats = TokenStats(*(torch.full((2, width), float(value)) for _ in range(4)))
        return Evaluation(Rollout(tokens, torch.ones_like(tokens).bool(), mask), stats, torch.zeros(2), 1)

    stats, mask, completions = together([evaluation(2, 7), evaluation(3, 8)])
    assert mask.tolist() == [[True, True, False]] * 2 + [[True] * 3] * 2
    assert torch.equal(torch.where(mask, completions, 0), torch.where(mask, stats.kl, 0).long())


def test_errors_by_position_against_a_jackknife():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, 1, 1, dtype=torch.float64, generator=generator).expand(200, 2, 3)
    values = (values + 0.3 * torch.randn(200, 2, 3, generator=generator)).flatten(0, 1)
    mask = torch.rand(400, 3, generator=generator) < torch.tensor([1.0, 0.7, 0.4])
    means, errors, counts = by_position(values, mask, group_size=2)
    assert counts.tolist() == mask.sum(0).tolist()
    kept = torch.where(mask, values, 0)
    assert torch.allclose(means, kept.sum(0) / mask.sum(0))
    left_out = torch.stack(
        [
            by_position(*(torch.cat([x[: 2 * i], x[2 * i + 2 :]]) for x in (values, mask)), 2)[0]
            for i in range(200)
        ]
    )
    jackknife = ((left_out - left_out.mean(0)).square().sum(0) * 199 / 200).sqrt()
    assert torch.allclose(errors, jackknife, rtol=0.02)
