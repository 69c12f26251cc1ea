"""The reward model: trained on labels through the command line, and used as a reward."""

import json
from pathlib import Path

import pytest
import torch

from lit_klrb.cli.main import main
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.modules import RewardModule
from lit_klrb.rewards import load_reward

LONGER = [
    *("--data.train_size", "4096", "--data.eval_size", "128", "--data.batch_size", "32"),
    *("--model.learning_rate", "0.01", "--trainer.max_steps", "160", "--trainer.val_check_interval", "80"),
]


@pytest.fixture(scope="module")
def run(chain, tmp_path_factory):
    """The run directory of a model that was trained for a while."""
    root = tmp_path_factory.mktemp("reward")
    assert chain.run("fit", "reward", *LONGER, run=root) == 0
    return root


def test_it_learns_the_labels(run):
    final = json.loads((run / "summary.json").read_text())["final"]
    assert final["accuracy"] > 0.7  # the accuracy of the exact posterior is 82 %
    assert final["loss"] < 0.6
    assert final["accuracy_se"] == pytest.approx(
        (final["accuracy"] * (1 - final["accuracy"]) / 127) ** 0.5, rel=1e-4
    )


def test_its_checkpoint_is_a_reward(run):
    path = str(run / "checkpoints" / "last.ckpt")
    reward, exact = load_reward(path), load_reward("grammar")
    texts = [review.text for review in exact.grammar.reviews(64, 7)]
    agreement = torch.corrcoef(torch.stack([reward(texts), exact(texts)]))[0, 1]
    assert agreement > 0.6
    model = loading.load_model("key", path, loading.CLASSIFIER)
    assert model.config.label2id == {"negative": 0, "positive": 1}
    assert torch.equal(load_reward(path, "negative")(texts), -reward(texts))


def test_it_is_validated_tested_and_predicts(chain, run):
    path = str(run / "checkpoints" / "last.ckpt")
    for command in ("validate", "test", "predict"):
        assert chain.run(command, "reward", *LONGER, "--ckpt_path", path, run=run) == 0
    rows = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert set(rows[0]) == {"text", "label", "probability"}
    share = sum(row["probability"] > 0.5 for row in rows) / len(rows)
    assert share > 0.7


def test_a_corpus_without_labels_is_refused(chain, tmp_path, capsys):
    (tmp_path / "reviews.jsonl").write_text("".join(f'{{"text": "review {i}"}}\n' for i in range(50)))
    source = ["--data.source", str(tmp_path / "reviews.jsonl"), "--data.eval_size", "1"]
    assert chain.run("fit", "reward", *source, run=tmp_path / "run") == 2
    assert "split; rows need a label, 1 (positive) or 0 (negative)" in capsys.readouterr().err


def test_a_classifier_has_a_head_and_a_backbone_gets_one():
    with pytest.raises(ConfigurationError, match=r"^backbone_path: a gets a new head, but classifier_path=b"):
        RewardModule(backbone_path="a", classifier_path="b")


def test_a_missing_backbone_is_made_by_its_configuration(capsys, monkeypatch, tmp_path):
    for folder in ("configs", "replication"):
        (tmp_path / folder).symlink_to(Path(folder).resolve())
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "replication/configs/imdb_night/reward.yaml"]) == 2
    maker = "make it with: lit-klrb fit --config replication/configs/imdb_night/pretraining.yaml"
    assert maker in capsys.readouterr().err
