"""A model that an option names takes the place of a configuration file's new weights."""

import pytest
import yaml

from lit_klrb.cli.main import main


def without_new_weights(argv):
    """The arguments of `Commands.argv` without the tiny settings of new weights."""
    found = {place for place, word in enumerate(argv) if "_config." in word}
    return [word for place, word in enumerate(argv) if not {place, place - 1} & found]


@pytest.mark.parametrize(
    ("stage", "option", "made_by"),
    [
        ("sft", "policy_path", "dpo"),
        ("distill", "init_args.policy_path", "dpo"),
        ("reward", "classifier_path", "reward"),
        ("reward", "backbone_path", "sft"),
    ],
)
def test_it_needs_no_other_option(chain, tmp_path, stage, option, made_by):
    argv = without_new_weights(chain.commands.argv("fit", stage, run=tmp_path / "run"))
    assert main([*argv, f"--model.{option}={chain.checkpoint(made_by)}"]) == 0
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["init_args"]
    assert written["classifier_config" if stage == "reward" else "policy_config"] is None
    assert written[option.removeprefix("init_args.")] == chain.checkpoint(made_by)
