import json

import pytest
import torch

from lit_klrb.estimators.advice import DEFAULT
from lit_klrb.modules import DistillModule


@pytest.mark.parametrize("estimator", ["RaoBlackwell", "RaoBlackwellSequence"])
def test_a_fresh_student_comes_nearer_to_its_teacher(chain, tmp_path, estimator):
    extra = [
        "--trainer.max_steps",
        "40",
        "--trainer.val_check_interval",
        "40",
        "--model.learning_rate",
        "0.02",
    ]
    assert chain.run("fit", "distill", "--kl.estimator", estimator, *extra, run=tmp_path) == 0
    rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    header = rows[0].split(",")
    kls = [
        float(row.split(",")[header.index("val/kl")])
        for row in rows[1:]
        if row.split(",")[header.index("val/kl")]
    ]
    final = json.loads((tmp_path / "summary.json").read_text())["final"]
    assert final["kl"] == kls[-1] < 0.8 * kls[0]
    assert final["reward"] == 0
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["policy_config"]["n_embd"] == 8
    assert all(key.startswith("policy.") for key in saved["state_dict"])


def test_without_a_reward_the_default_estimator_is_rao_blackwell(chain, tmp_path):
    finals = []
    for estimator in (DEFAULT.__name__, "RaoBlackwell"):
        run = tmp_path / estimator
        extra = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "4"]
        assert chain.run("fit", "distill", "--kl.estimator", estimator, *extra, run=run) == 0
        finals.append(json.loads((run / "summary.json").read_text())["final"])
    assert finals[0] == finals[1]


def test_a_student_is_fresh_or_given_and_not_both():
    with pytest.raises(ValueError, match=r"give either policy_config \(fresh weights\) or policy_path"):
        DistillModule(reference_path="x")
