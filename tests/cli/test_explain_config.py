"""`explain --config`: what configurations of other software train with."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from lit_klrb.cli.foreign.reading import MAX_WORD
from lit_klrb.cli.foreign.report import explain_config, text
from lit_klrb.cli.main import main
from lit_klrb.estimators import K1Loss, K2Loss, names
from lit_klrb.estimators.names import NAMES_IN_USE
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
        ("verl_distillation.sh", "verl", [("advantage", "K2Loss(off_policy='token')", 1.0)]),
        ("nemo_distillation.yaml", "NeMo-RL", [("loss", None, 1.0)]),
        ("open_instruct.sh", "open-instruct", [("loss", "K3Loss", 0.03)]),
        ("trl_distillation.py", "TRL", [("loss", "RaoBlackwellLoss", 1.0)]),
    ],
)
def test_the_examples(name, framework, terms):
    finding = explain_config(str(EXAMPLES / name))
    assert re.match(rf"{framework} \(defaults of (commit \w{{7}}|1.16|0.16), .*202\d", finding.framework)
    assert [(term.place, term.equals, term.coefficient) for term in finding.terms] == terms


def test_settings_change_the_answer(tmp_path):
    for setting, equals in (
        ("use_bias_correction_kl: false", "K3Loss"),
        ("importance_sampling_level: sequence", None),
        ("loss_type: grpo", "K2Loss(off_policy='token')"),
        ("use_bias_correction_kl: 'yes'", "K2Loss(off_policy='token')"),
    ):
        (tmp_path / "grpo.yaml").write_text(f"beta: 0.1\n{setting}\n")
        assert explain_config(str(tmp_path / "grpo.yaml")).terms[0].equals == equals
    for kind, equals in (("kl", "K1Loss"), ("k3+", "K2Loss"), ("abs", None), ("low_var_kl+", "K2Loss")):
        script = (
            f"python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=true {'actor_rollout_ref'}"
        )
        (tmp_path / "run.sh").write_text(f"{script}.actor.kl_loss_type={kind}\n")
        assert explain_config(str(tmp_path / "run.sh")).terms[0].equals == equals


DISTIL = "python -m verl.trainer.main_ppo distillation.enabled=true"
MODE, REWARDS, GRADIENT = (
    f"distillation.distillation_loss.{key}"
    for key in ("loss_mode", "use_task_rewards", "use_policy_gradient")
)


@pytest.mark.parametrize(
    ("settings", "place", "equals", "text_of_the_answer"),
    [
        ("", "loss", "K3Loss", "adv_estimator=gae and distillation"),
        (f"{MODE}=k2", "loss", "K2Loss", "the student and its teacher"),
        (f"{MODE}=k3 {GRADIENT}=true", "advantage", None, "optimises nothing that a KL is: its own k3"),
        (f"{MODE}=kl {GRADIENT}=true", "advantage", "K2Loss(off_policy='token')", "within PPO's clipping"),
        (f"{MODE}=forward_kl_topk", "loss", None, "the other direction"),
        (f"{MODE}=forward_kl_topk {GRADIENT}=true", "advantage", None, "optimises nothing that a KL is"),
        (
            f"{REWARDS}=false distillation.distillation_loss.distillation_loss_coef=7",
            "loss",
            "K3Loss",
            "=1.0",
        ),
    ],
)
def test_distillation_of_verl(tmp_path, settings, place, equals, text_of_the_answer):
    (tmp_path / "run.sh").write_text(f"{DISTIL} {settings}\n")
    finding = explain_config(str(tmp_path / "run.sh"))
    assert [(term.place, term.equals) for term in finding.terms] == [(place, equals)]
    assert text_of_the_answer in text(finding)


def test_distillation_and_a_penalty_are_two_kls(tmp_path):
    penalty = "actor_rollout_ref.actor.use_kl_loss=true"
    (tmp_path / "run.sh").write_text(f"{DISTIL} {penalty}\n")
    finding = explain_config(str(tmp_path / "run.sh"))
    assert len(finding.terms) == 2
    assert "penalised twice" not in text(finding)
    (tmp_path / "run.sh").write_text(
        f"{DISTIL} {penalty} {REWARDS}=false\n"
    )  # no policy loss, and no penalty
    assert len(explain_config(str(tmp_path / "run.sh")).terms) == 1


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ("loss_fn: {kl_type: forward}", "KL(teacher || student) over the teacher's likeliest tokens"),
        ("loss_fn: {kl_type: mixed}", "a mixture of both directions"),
        ("loss_fn: {kl_type: reverse, zero_outside_topk: true}", "and what the student puts outside them"),
    ],
)
def test_distillation_of_nemo_rl(tmp_path, settings, value):
    (tmp_path / "x.yaml").write_text(f"distillation: {{topk_logits_k: 64}}\n{settings}\n")
    finding = explain_config(str(tmp_path / "x.yaml"))
    assert value in finding.terms[0].value
    assert ", weight 1\n" in text(finding)
    (tmp_path / "x.yaml").write_text(
        "grpo: {adv_estimator: {name: opd}}\nloss_fn: {token_level_loss: true}\n"
    )
    first, _ = explain_config(str(tmp_path / "x.yaml")).terms
    assert (first.place, first.equals) == ("advantage", "K2Loss(off_policy='token')")


@pytest.mark.parametrize(
    ("beta", "value"), [("0.0", "KL(teacher || student)"), ("0.5", "a divergence between")]
)
def test_distillation_of_trl(tmp_path, beta, value):
    (tmp_path / "x.yaml").write_text(f"teacher_model_name_or_path: big/model\nbeta: {beta}\n")
    (term,) = explain_config(str(tmp_path / "x.yaml")).terms
    assert term.equals is None
    assert value in term.value


@pytest.mark.parametrize(
    ("kind", "equals"), [("0", "K1Loss"), ("1", "K2Loss"), ("3", "K2Loss(off_policy='token')")]
)
def test_estimates_of_open_instruct(tmp_path, kind, equals):
    (tmp_path / "x.sh").write_text(
        f"python open_instruct/grpo.py --kl_estimator {kind} --loss_denominator 9\n"
    )
    finding = explain_config(str(tmp_path / "x.sh"))
    assert (finding.terms[0].equals, finding.terms[0].coefficient) == (equals, 0.05)
    assert "divided by --loss_denominator" in finding.notes[0]


def test_openrlhf_and_nemo_rl_have_the_gradients_that_the_table_of_names_states(tmp_path):
    """What `explain` and `explain --config` say about them is read at the same commits."""
    equals = {entry.name: entry.equals for entry in NAMES_IN_USE}
    openrlhf_loss = "python -m openrlhf.cli.train_ppo_ray --algo.kl.use_loss --algo.kl.estimator k3"
    for name, file, content in (
        ("unbiased_gradient", "x.sh", f"{openrlhf_loss} --algo.kl.unbiased_gradient\n"),
        ("k3 in the loss", "x.sh", f"{openrlhf_loss}\n"),
        ("K3++", "x.yaml", "loss_fn: {reference_policy_kl_type: k3}\n"),
        ("ratio times k3 (unbiased KL)", "x.yaml", "loss_fn: {use_on_policy_kl_approximation: true}\n"),
    ):
        (tmp_path / file).write_text(content)
        finding = explain_config(str(tmp_path / file))
        assert finding.terms[0].equals == equals[name]
        (used_by,) = (entry.used_by for entry in NAMES_IN_USE if entry.name == name)
        assert finding.framework.split()[0] in used_by
        (commit,) = re.findall(r"commit (\w{7}),", finding.framework)
        assert f" {commit}" in names.__doc__
    in_reward = "python -m openrlhf.cli.train_ppo_ray --algo.kl.unbiased_gradient\n"
    (tmp_path / "x.sh").write_text(in_reward)
    assert explain_config(str(tmp_path / "x.sh")).terms[0].equals == "MonteCarloRewardToGo"


@pytest.mark.parametrize(
    ("settings", "divided"),
    [
        ("{}", True),
        ("{normalize_rewards: false}", True),
        ("{adv_estimator: {normalize_rewards: false}}", False),
        (
            "{normalize_rewards: false, adv_estimator: {normalize_rewards: '${grpo.normalize_rewards}'}}",
            False,
        ),
        ("{adv_estimator: {normalize_rewards: '${grpo.normalize_rewards}'}}", True),
        ("{adv_estimator: {name: gdpo}}", True),
        ("{adv_estimator: {name: reinforce_plus_plus}}", False),
    ],
)
def test_nemo_rl_divides_by_what_its_advantage_estimator_reads(tmp_path, settings, divided):
    (tmp_path / "x.yaml").write_text(f"grpo: {settings}\nloss_fn: {{token_level_loss: true}}\n")
    notes = explain_config(str(tmp_path / "x.yaml")).notes
    assert any("divided by their group's standard deviation" in note for note in notes) is divided
    assert any("whitened" in note for note in notes) is ("plus_plus" in settings)


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("x.yaml", "loss_fn: {token_level_loss: true}", "is a mean over the batch's tokens"),
        ("x.yaml", "loss_fn: {token_level_loss: false}", "divided by its length"),
        ("x.sh", "openrlhf --algo.advantage.estimator gae", "whitened"),
        ("x.sh", "openrlhf --algo.advantage.estimator group_norm", "divided by their group's"),
        ("x.sh", "openrlhf --algo.kl.target 6", "the coefficient adapts to --algo.kl.target"),
    ],
)
def test_normalisation_is_a_note(tmp_path, name, content, note):
    (tmp_path / name).write_text(content)
    assert any(note in line for line in explain_config(str(tmp_path / name)).notes)


def test_advantages_without_division_are_not_whitened(tmp_path):
    (tmp_path / "x.sh").write_text("openrlhf --algo.advantage.estimator gae --algo.advantage.no_std_norm\n")
    assert "whitened" not in " ".join(explain_config(str(tmp_path / "x.sh")).notes)


def test_the_answer_in_words(capsys):
    assert main(["explain", "--config", str(EXAMPLES / "verl_both.yaml")]) == 0
    output = capsys.readouterr().out
    assert "has the gradient of K2Loss, completion by completion" in output
    assert "optimises: the gradient of KL(policy || reference), exactly" in output
    assert "two coefficients are set, actor_rollout_ref.actor.kl_loss_coef=0.001 and algorithm.kl" in output
    assert "divided by its length" in output
    assert "two coefficients" not in text(explain_config(str(EXAMPLES / "verl_grpo.sh")))
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
        ("x.yaml", "learning_rate: 1\n", "has no settings of a trainer of TRL (GRPO, RLOO, PPO, dist"),
        ("x.sh", f"{DISTIL} {MODE}=k1\n", f"{MODE}: verl refuses k1 without use_policy_gradient"),
        ("x.sh", f"{DISTIL} {MODE}=jsd\n", "jsd is not known here; kl, k1, mse"),
        (
            "x.sh",
            "verl.trainer actor_rollout_ref.actor.use_kl_loss=1 actor_rollout_ref.actor.kl_loss_type=full\n",
            "full is not known here",
        ),
        (
            "x.yaml",
            "distillation: {a: 1}\nloss_fn: {gold_loss: true}\n",
            "of NeMo-RL's distillations, that with",
        ),
        ("x.yaml", "distillation: {a: 1}\nloss_fn: {kl_type: js}\n", "of NeMo-RL's distillations, that with"),
        ("x.yaml", "loss_fn: {reference_policy_kl_type: k4}\n", "k4 is not known here; k1, k2, k3 are"),
        (
            "x.yaml",
            "loss_fn: {a: 1}\ngrpo: {adv_estimator: {name: new}}\n",
            "new is not known here; grpo, gdpo",
        ),
        ("x.sh", "deepspeed --module openrlhf.cli.train_dpo --beta 0.1\n", "only train_ppo is known here"),
        ("x.sh", "openrlhf --algo.kl.estimator k9\n", "k9 is not known here; k1, k3, k2"),
        ("x.sh", "python open_instruct/dpo.py\n", "of open-instruct, only GRPO is known here"),
        ("x.sh", "python open_instruct/grpo.py --kl_estimator 4\n", "4 is not known here; 0, 1, 2, 3 are"),
        ("x.yaml", "beta: 0.1\nnum_generations: 4\n", "rename the file so that it contains grpo or rloo"),
        ("x.yaml", "- 1\n", "is not a mapping of keys to values"),
        ("x.yaml", "a: [\n", "is not YAML"),
        ("x.py", "print(\n", "cannot be read as Python"),
        ("x.py", "import trl\n", "has no settings of a trainer"),
        ("x.sh", "echo 'no end\n", "cannot be read as a shell script"),
        ("x.sh", "\xff", "is not encoded in UTF-8"),
        (
            "x.yaml",
            "a: !!python/object/apply:os.system [ls]\n",
            "cannot be read as YAML: could not determine a constructor",
        ),
        ("x.yaml", "? [a]\n: 1\n", "cannot be read as YAML: while constructing a mapping"),
        ("x.yaml", "a: 2026-99-99\n", "cannot be read as YAML: month must be in 1..12"),
        ("x.yaml", f"a: 1{5000 * '0'}\n", "cannot be read as YAML: Exceeds the limit"),
        ("x.yaml", 99 * "[", "is nested more than 50 levels deep"),
        ("x.py", f"x = {100_000 * '-'}1\n", "cannot be read as Python"),
        ("x.py", f"x = a{50_000 * '.b'}\n", "cannot be read as Python"),
        ("x.sh", 1_000_001 * "#", "has 1000001 bytes; a configuration has at most 1000000"),
    ],
)
def test_other_files_end_in_one_line(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert main(["explain", "--config", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error


@pytest.mark.parametrize("name", ["pipe.yaml", "pipe.py", "pipe"])
def test_a_pipe_is_not_waited_for_by_explain(tmp_path, capsys, name):
    os.mkfifo(tmp_path / name)
    assert main(["explain", "--config", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.endswith(
        f"{name} is not a file; the path of a configuration is expected\n"
    )


@pytest.mark.parametrize(
    "parent", ["pipe.yaml", "secret.txt", "x.yaml", "missing.yaml", f"{5000 * 'x'}.yaml"]
)
def test_a_parent_is_another_yaml_file(tmp_path, parent):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "secret.txt").write_text("loss_fn: {reference_policy_kl_penalty: 7}\n")
    (tmp_path / "x.yaml").write_text(f"defaults: {parent}\nloss_fn: {{reference_policy_kl_type: k2}}\n")
    finding = explain_config(str(tmp_path / "x.yaml"))
    assert (finding.terms[0].value, finding.terms[0].coefficient) == ("ratio times k2", 0.01)
    assert f"{parent}, which it inherits from, is not beside it: library defaults are shown" in finding.notes


def test_values_that_are_no_numbers_are_shown_as_they_are(tmp_path, capsys):
    (tmp_path / "rloo.yaml").write_text("beta: .nan\nnormalize_advantages: true\n")
    assert explain_config(str(tmp_path / "rloo.yaml")).terms[0].coefficient == "nan"
    (tmp_path / "rloo.yaml").write_text(f"beta: 1{400 * '0'}\nnormalize_advantages: true\n")
    assert explain_config(str(tmp_path / "rloo.yaml")).terms[0].coefficient == f"1{400 * '0'}"
    (tmp_path / "rloo.yaml").write_text('beta: "\\e[2J\\nKL"\nnormalize_advantages: true\n')
    assert main(["explain", "--config", str(tmp_path / "rloo.yaml")]) == 0
    assert "\x1b" not in capsys.readouterr().out
    (tmp_path / "x.py").write_text("RLOOConfig(beta={[]: 1})\n")
    assert explain_config(str(tmp_path / "x.py")).terms[0].coefficient == "{[]: 1}"


def test_variables_of_a_script_are_replaced_once_and_do_not_grow(tmp_path):
    script = tmp_path / "x.sh"
    for beta in ('"${A}"', "${NONE:-$A}", "${NONE:-0.5}", "\\\n $A"):
        script.write_text(f"B=0.5\nA=$B\ntrl rloo --beta {beta} --normalize_advantages\n")
        expected = "$A" if "$A}" in beta else 0.5  # a default is not expanded again
        assert explain_config(str(script)).terms[0].coefficient == expected, beta
    bomb = "A0=aaaaaaaa\n" + "".join(f"A{i + 1}={4 * f'$A{i}'}\n" for i in range(40))
    script.write_text(f"{bomb}trl rloo --beta $A40\n")
    assert len(str(explain_config(str(script)).terms[0].coefficient)) <= MAX_WORD


def test_a_missing_file_and_two_questions_end_in_one_line(capsys):
    assert main(["explain", "--config", "no.sh"]) == 2
    assert "no.sh does not exist; the path of a configuration is expected" in capsys.readouterr().err
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
