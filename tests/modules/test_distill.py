import json
from pathlib import Path

import pytest
import torch
import yaml
from runs import equal, logged, weights_of

from lit_klrb.cli.check import AT_FIRST, LATER, check
from lit_klrb.cli.main import main
from lit_klrb.estimators.advice import ANNEALED, DEFAULT, WITHOUT_REWARD


@pytest.mark.parametrize("estimator", [None, "RaoBlackwellSequence"])
def test_a_fresh_student_comes_nearer_to_its_teacher(chain, tmp_path, capsys, estimator):
    extra = ["--trainer.max_steps", "40", "--trainer.val_check_interval", "40"]
    extra += ["--model.learning_rate", "0.02"]
    named = [] if estimator is None else ["--kl.estimator", estimator]
    assert chain.run("fit", "distill", *named, *extra, run=tmp_path) == 0
    begins_biased = "the discount increases from 0 to 1 over the run" in capsys.readouterr().out
    assert begins_biased == (estimator is None)
    kls = [*logged(tmp_path, "val/kl").values()]
    final = json.loads((tmp_path / "summary.json").read_text())["final"]
    assert final["kl"] == kls[-1] < 0.8 * kls[0]
    assert final["reward"] == 0
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["policy_config"]["n_embd"] == 8
    assert all(key.startswith("policy.") for key in saved["state_dict"])


@pytest.mark.parametrize(
    ("section", "options", "expected", "discounts"),
    [
        ({}, [], WITHOUT_REWARD.__name__, ANNEALED),
        ({"beta": 0.5}, [], WITHOUT_REWARD.__name__, ANNEALED),
        ({}, ["--kl.beta", "0.5"], WITHOUT_REWARD.__name__, ANNEALED),
        ({}, ["--kl.estimator.off_policy", "prefix"], WITHOUT_REWARD.__name__, ANNEALED),
        ({"estimator": {"init_args": {"baseline": None}}}, [], WITHOUT_REWARD.__name__, ANNEALED),
        ({}, ["--kl.estimator.discount", "1"], WITHOUT_REWARD.__name__, (1.0, 1.0)),
        # Whoever names an estimator has its own settings
        ({}, ["--kl.estimator", DEFAULT.__name__], DEFAULT.__name__, (None, None)),
        ({}, ["--kl.estimator", "MonteCarlo"], "MonteCarlo", (None, None)),
        ({}, ["--kl.estimator=RaoBlackwell"], "RaoBlackwell", (1.0, None)),
        ({}, ["--kl.estimator.class_path=RaoBlackwell"], "RaoBlackwell", (1.0, None)),
        ({"estimator": {"class_path": "RaoBlackwell"}}, [], "RaoBlackwell", (1.0, None)),
        ({"estimator": "MonteCarlo"}, [], "MonteCarlo", (None, None)),
    ],
)
def test_without_a_reward_another_estimator_is_the_default(
    chain, tmp_path, capsys, section, options, expected, discounts
):
    argv = chain.commands.argv("fit", "distill", "--trainer.max_steps", "1", run=tmp_path / "run")
    shipped = Path(argv[argv.index("--config") + 1])
    without = {key: value for key, value in yaml.safe_load(shipped.read_text("utf-8")).items() if key != "kl"}
    without |= {"kl": section} if section else {}
    (tmp_path / "distill.yaml").write_text(yaml.safe_dump(without), "utf-8")
    argv[argv.index("--config") + 1] = str(tmp_path / "distill.yaml")
    with pytest.raises(SystemExit):
        main([*argv, *options, "--print_config"])
    used = yaml.safe_load(capsys.readouterr().out)["kl"]
    assert used["estimator"]["class_path"].rpartition(".")[2] == expected
    assert (used["estimator"]["init_args"].get("discount"), used["final_discount"]) == discounts


def test_a_check_has_the_default_of_the_module(chain):
    answer = check(chain.commands.argv("fit", "distill"))
    assert answer["estimator"]["name"] == WITHOUT_REWARD.__name__
    assert answer["estimator"]["biased"] == AT_FIRST


def test_another_divergence_and_capped_ratios_are_named_and_logged(chain, tmp_path):
    options = ["--kl.estimator.divergence", "jsd", "--kl.estimator.jsd_weight", "0.1"]
    options += [
        "--kl.estimator.discount",
        "1",
        "--kl.estimator.off_policy",
        "prefix",
        "--model.inner_epochs",
        "2",
    ]
    capped = [*options, "--kl.estimator.ratio_cap", "1.1"]
    argv = chain.commands.argv("fit", "distill")
    exact, biased = (check([*argv, *extra])["estimator"] for extra in (options, capped))
    assert exact["optimises"].startswith("the gradient of the Jensen-Shannon divergence (0.1) summed over")
    assert (exact["biased"], biased["biased"]) == (False, LATER)
    assert "ratio_cap 1.1" in biased["optimises"]
    assert chain.run("fit", "distill", *capped, "--trainer.max_steps", "2", run=tmp_path) == 0
    first, second = logged(tmp_path, "train/ess").values()
    assert first == pytest.approx(1.0, abs=1e-5)
    assert 0.5 < second < 1 - 1e-5
    kl, divergence = (next(iter(logged(tmp_path, f"train/{name}").values())) for name in ("kl", "divergence"))
    assert 0.3 * kl < divergence < kl


def test_a_reward_is_measured_and_not_trained_with(chain, tmp_path):
    for name, extra in (("without", []), ("with", ["--model.reward_path", "grammar"])):
        steps = ("--trainer.max_steps", "2", "--trainer.val_check_interval", "2")
        assert chain.run("fit", "distill", *steps, *extra, run=tmp_path / name) == 0
    assert equal(weights_of(tmp_path / "without"), weights_of(tmp_path / "with"))
    measured = json.loads((tmp_path / "with" / "summary.json").read_text())["final"]
    assert measured["reward"] != 0
    assert measured["reward_se"] > 0
