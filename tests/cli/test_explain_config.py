"""`explain --config`: what configurations of TRL, verl, OpenRLHF and NeMo-RL train with."""

import json
from pathlib import Path

import pytest
import torch

from lit_klrb.cli.foreign.report import explain_config, text
from lit_klrb.cli.main import main
from lit_klrb.estimators import K1Loss, K2Loss
from lit_klrb.functional import TokenStats, kl_k1_per_token, kl_k2_per_token, kl_k3_per_token

EXAMPLES = Path(__file__).with_name("foreign_configs")


@pytest.mark.parametrize(
    ("name", "framework", "terms"),
    [
        ("trl_grpo.py", "TRL", [("loss", "K2Loss(off_policy='token')", 0.04)]),
        ("trl_grpo.yaml", "TRL", [("loss", "K2Loss(off_policy='token')", 0.0)]),
        ("trl_rloo.sh", "TRL", [("reward", "MonteCarlo", 0.07)]),
        ("trl_ppo.yaml", "TRL", [("reward", "K3Reward", 0.03)]),
        ("verl_grpo.sh", "verl", [("loss", "K3Loss", 0.002)]),
        ("verl_both.yaml", "verl", [("loss", "K2Loss", 0.001), ("reward", "MonteCarlo", 0.01)]),
        ("openrlhf_reinforce.sh", "OpenRLHF", [("reward", "MonteCarloRewardToGo", 1e-4)]),
        ("openrlhf_2024.sh", "OpenRLHF", [("loss", "K3Loss", 0.01)]),
        ("nemo_grpo.yaml", "NeMo-RL", [("loss", "K2Loss(off_policy='token')", 0.02)]),
        ("nemo_reinforce.yaml", "NeMo-RL", [("reward", "K2Loss", 0.01)]),
        ("nemo_lost.yaml", "NeMo-RL", []),
    ],
)
def test_the_examples(name, framework, terms):
    finding = explain_config(str(EXAMPLES / name))
    assert finding.framework.startswith(f"{framework} (defaults of")
    assert [(term.place, term.equals, term.coefficient) for term in finding.terms] == terms


def test_settings_change_the_answer(tmp_path):
    for setting, equals in (
        ("use_bias_correction_kl: false", "K3Loss"),
        ("importance_sampling_level: sequence", None),
        ("loss_type: grpo", "K2Loss(off_policy='token')"),
    ):
        (tmp_path / "grpo.yaml").write_text(f"beta: 0.1\n{setting}\n")
        assert explain_config(str(tmp_path / "grpo.yaml")).terms[0].equals == equals
    for kind, equals in (("kl", "K1Loss"), ("k3+", "K2Loss"), ("abs", None), ("full", None)):
        script = (
            f"python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=true {'actor_rollout_ref'}"
        )
        (tmp_path / "run.sh").write_text(f"{script}.actor.kl_loss_type={kind}\n")
        assert explain_config(str(tmp_path / "run.sh")).terms[0].equals == equals


def test_the_answer_in_words(capsys):
    assert main(["explain", "--config", str(EXAMPLES / "verl_both.yaml")]) == 0
    output = capsys.readouterr().out
    assert "has the gradient of K2Loss, completion by completion" in output
    assert "optimises: the gradient of KL(policy || reference), exactly" in output
    assert "two coefficients are set, actor_rollout_ref.actor.kl_loss_coef=0.001 and algorithm.kl" in output
    assert "divided by its length" in output
    without = text(explain_config(str(EXAMPLES / "trl_grpo.yaml")))
    assert "off, as beta is 0\nthere is no KL term" in without
    assert "does not put it into the reward" in text(explain_config(str(EXAMPLES / "nemo_lost.yaml")))


def test_the_answer_as_json(capsys):
    assert main(["explain", "--json", "--config", str(EXAMPLES / "verl_both.yaml")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["both_coefficients_set"] is True
    assert found["kl_terms"][0]["refusal"].startswith("it omits the effect of earlier tokens")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.yaml", "learning_rate: 1\n", "has no settings of a trainer of TRL (GRPO, RLOO, PPO), verl"),
        ("x.yaml", "beta: 0.1\nnum_generations: 4\n", "rename the file so that it contains grpo or rloo"),
        ("x.yaml", "- 1\n", "is not a mapping of keys to values"),
        ("x.yaml", "a: [\n", "is not YAML"),
        ("x.py", "print(\n", "cannot be read as Python"),
        ("x.py", "import trl\n", "has no settings of a trainer"),
        ("x.sh", "echo 'no end\n", "cannot be read as a shell script"),
        ("x.sh", "\xff", "is not encoded in UTF-8"),
    ],
)
def test_other_files_end_in_one_line(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert main(["explain", "--config", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error


def test_a_missing_file_and_two_questions_end_in_one_line(capsys):
    assert main(["explain", "--config", "no.sh"]) == 2
    assert "config: no.sh cannot be read (No such file" in capsys.readouterr().err
    assert main(["explain", "K3Loss", "--config", "no.sh"]) == 2
    assert "give either an estimator or --config" in capsys.readouterr().err


def test_nothing_in_a_file_is_run(tmp_path):
    (tmp_path / "x.py").write_text(
        f"from trl import RLOOConfig\nopen({str(tmp_path / 'run')!r}, 'w')\nRLOOConfig(beta=0.1)\n"
    )
    assert explain_config(str(tmp_path / "x.py")).terms[0].coefficient == 0.1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_ratio_times_an_estimate_has_the_gradient_that_is_claimed(kind):
    """NeMo-RL's loss: exp(log p - sg log p) times k1, k2 or k3 of each token."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
    q, mask = torch.randn(2, 3, generator=generator, dtype=torch.float64), torch.ones(2, 3, dtype=torch.bool)
    value = {"k1": kl_k1_per_token, "k2": kl_k2_per_token, "k3": kl_k3_per_token}[kind]
    loss = ((p - p.detach()).exp() * value(p, q)).sum() / len(p)
    (theirs,) = torch.autograd.grad(loss, p)

    def gradient(estimator):
        (found,) = torch.autograd.grad(estimator.surrogate(TokenStats(p, q), mask, group_size=2), p)
        return found

    expected = {
        "k1": lambda: gradient(K2Loss()) + gradient(K1Loss()),
        "k2": lambda: gradient(K2Loss()) + value(p, q).detach() / len(p),
        "k3": lambda: gradient(K2Loss()),
    }[kind]()
    torch.testing.assert_close(theirs, expected)
