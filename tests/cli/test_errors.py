"""Wrong input ends with exit code 2 and one line that names the key, the value, and the way out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lit_klrb
from lit_klrb.cli.main import main

WRONG = [
    (
        ["--kl.estimator", "RaoBlackwel"],
        "kl.estimator: RaoBlackwel is no known class (did you mean RaoBlackwell?)",
    ),
    (["--kl.estimator", "K3Reward"], "K3Reward is not trained with unless allow_biased is true"),
    (
        ["--kl.estimator.off_policy", "x"],
        "kl.estimator.init_args.off_policy: 'x' is not one of 'none', 'prefix'",
    ),
    (
        ["--kl.estimator.baseline", "x"],
        "kl.estimator.init_args.baseline: 'x' is not one of 'leave_one_out', null",
    ),
    (["--kl.beta", "-1"], "kl.beta must be 0 or larger, got -1.0"),
    (["--kl.target_kl", "0"], "kl.target_kl must be positive, got 0.0"),
    (["--kl.target_kl", "1", "--kl.final_beta", "1"], "both move beta: give one of them"),
    (["--kl.beta", "much"], "kl.beta: 'much' is not of type float"),
    (["--kl.betta", "1"], "unknown key kl.betta (did you mean kl.beta?)"),
    (["--model", "RLOModule"], "model: RLOModule is no known class (did you mean RLOOModule?)"),
    (["--model.inner_epoch", "1"], "unknown key model.init_args.inner_epoch (did you mean inner_epochs?)"),
    (["--model.inner_epochs", "0"], "model.init_args.inner_epochs: must be at least 1, got 0"),
    (["--model.mini_batches", "3"], "batch_size: 4 prompts cannot be split evenly"),
    (["--model.completions_per_prompt", "1"], "completions_per_prompt: must be at least 2"),
    (
        ["--model.missing_eos_penalty", "1", "--model.stop_at_eos", "false"],
        "missing_eos_penalty: must be 0 or larger, and 0 unless stop_at_eos, got 1.0 with stop_at_eos=False",
    ),
    (
        ["--model.evaluation_completions", "0"],
        "model.init_args.evaluation_completions: must be at least 1, got 0",
    ),
    (["--model.temperature", "0"], "model.init_args.temperature: must be positive, got 0.0"),
    (["--model.max_new_tokens", "100"], "exceeds the policy's context length, 64"),
    (["--model.weight_decay", "-1"], "model.init_args.weight_decay: must be 0 or larger, got -1.0"),
    (["--trainer.limit_train_batches", "2"], "trainer.limit_train_batches=2 would repeat the same batches"),
    (["--model.learning_rate", "fast"], "model.init_args.learning_rate: 'fast' is not of type float"),
    (["--model.learning_rate", "0"], "model.init_args.learning_rate: must be positive, got 0.0"),
    (["--model.schedule", "zigzag"], "model.init_args.schedule: 'zigzag' is not one of 'constant', 'linear'"),
    (["--model.reward_path", "/no/where"], "model.init_args.reward_path: /no/where does not exist"),
    (
        ["--model.reward_path", "{grammar: 1.0, /no/where.ckpt: 0.5}"],
        "model.init_args.reward_path: /no/where.ckpt does not exist",
    ),
    (["--model.reward_path", "math:nope"], "reward_path: cannot import math:nope"),
    (["--model.policy_path", "/no/where.ckpt"], "model.init_args.policy_path: /no/where.ckpt does not exist"),
    (["--model.policy_path", "/no/where"], "model.init_args.policy_path: /no/where does not exist"),
    (["--data.batch_size", "0"], "data.init_args.batch_size: must be at least 1, got 0"),
    (["--data.max_prompt_tokens", "1"], "data.init_args.max_prompt_tokens: must be at least 2, got 1"),
    (["--data.source", "/no/where"], "data.init_args.source: /no/where cannot be read"),
    (
        ["--data", "PromptDatModule"],
        "data: PromptDatModule is no known class (did you mean PromptDataModule?)",
    ),
    (["--trainer.max_steps", "many"], "trainer.max_steps: 'many' is not of type int"),
    (["--trainer.max_stps", "1"], "unknown key trainer.max_stps (did you mean trainer.max_steps?)"),
    (["--ckpt_path", "/no/where.ckpt"], "ckpt_path: /no/where.ckpt does not exist"),
]


def one_line_of(capsys):
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("wrong", "message"), WRONG, ids=lambda value: value[0] if type(value) is list else None
)
def test_wrong_input(chain, capsys, tmp_path, wrong, message):
    assert chain.run("fit", "rloo", *wrong, run=tmp_path / "run") == 2
    line = one_line_of(capsys)
    assert line.startswith("error: ")
    assert message in line


def test_a_missing_checkpoint_names_the_command_that_makes_it(capsys, tmp_path, monkeypatch):
    configs = tmp_path / "configs" / "demo"
    configs.mkdir(parents=True)
    for stage in ("sft", "dpo", "rloo"):
        source = f"configs/demo/{stage}.yaml"
        (configs / f"{stage}.yaml").write_text(Path(source).read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "configs/demo/rloo.yaml"]) == 2
    assert one_line_of(capsys) == (
        "error: model.init_args.policy_path: runs/demo/dpo/checkpoints/last.ckpt does not exist; "
        "make it with: python -m lit_klrb fit --config configs/demo/dpo.yaml"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "a command is missing; one of fit, validate, test, predict, explain, export expected"),
        (["train"], "unknown command train; one of fit"),
        (["fit"], "what to run is missing: name a configuration"),
        (["fit", "--config", "no.yaml"], "no.yaml"),
        (["export", "--ckpt_path", "no.ckpt", "--output_dir", "x"], "ckpt_path: no.ckpt does not exist"),
        (["explain", "K3Rewad"], "did you mean K3Reward?"),
    ],
)
def test_wrong_commands(capsys, argv, message):
    assert main(argv) == 2
    assert message in one_line_of(capsys)


def test_resuming_with_other_settings_is_refused(chain, capsys, tmp_path):
    extra = ["--ckpt_path", chain.checkpoint("rloo"), "--model.learning_rate", "0.5"]
    assert chain.run("fit", "rloo", *extra, run=tmp_path) == 2
    assert "was trained with learning_rate=0.001, not 0.5" in one_line_of(capsys)


def test_the_programs_help_lists_its_commands(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(
        f"\n  {name} " in output for name in ("fit", "validate", "test", "predict", "explain", "export")
    )


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit_klrb {lit_klrb.__version__}\n"


def test_the_commands_help_explains_its_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help"])
    assert ended.value.code == 0
    assert "--kl.beta" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["K3Loss", "--json"], ["--help"]])
def test_a_reader_that_stops_early_ends_a_command_quietly(options):
    command = [sys.executable, "-m", "lit_klrb", "explain", *options]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode in (0, 1)  # argparse, which prints the help, keeps the error to itself
    assert done.stderr == ""
