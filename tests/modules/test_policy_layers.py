"""Policies made from some layers of a model: prune and heal."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_klrb.cli.main import main
from lit_klrb.models.loading import load_model

THREE_LAYERS = ["--model.policy_config.n_layer", "3"]


@pytest.fixture(scope="module")
def whole(chain, tmp_path_factory):
    """A checkpoint of a model with three layers."""
    run = tmp_path_factory.mktemp("whole")
    assert chain.run("fit", "sft", *THREE_LAYERS, run=run) == 0
    return str(run / "checkpoints" / "last.ckpt")


def healed(chain, whole, run, *extra):
    argv = chain.commands.argv("fit", "distill", "--model.reference_path", whole, *extra, run=run)
    place = argv.index("--model.policy_config.n_embd")
    return main([*argv[:place], *argv[place + 2 :]])


def test_a_pruned_model_is_healed_saved_and_exported(chain, whole, tmp_path):
    run = tmp_path / "run"
    extra = ["--model.policy_path", whole, "--model.policy_layers", "[0, 2]"]
    assert healed(chain, whole, run, *extra, "--model.learning_rate", "1e-12") == 0
    assert json.loads((run / "summary.json").read_text())["final"]["kl"] > 1e-3
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    saved, original = (load_model("policy_path", path) for path in (checkpoint, whole))
    assert saved.config.n_layer == 2
    for ours, theirs in zip(
        saved.transformer.h, [original.transformer.h[index] for index in (0, 2)], strict=True
    ):
        for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(first, second, atol=1e-6)
    assert main(["export", "--ckpt_path", checkpoint, "--output_dir", str(tmp_path / "model")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.n_layer == 2
    assert healed(chain, whole, run, *extra, "--model.learning_rate", "1e-12", "--ckpt_path", checkpoint) == 0


@pytest.mark.parametrize("stage", ["sft", "distill"])
def test_a_new_model_has_its_own_number_of_layers(chain, tmp_path, capsys, stage):
    assert chain.run("fit", stage, "--model.policy_layers", "[0]", run=tmp_path / "run") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    expected = "policy_layers: needs policy_path; policy_config has its own number of layers"
    assert line == f"error: model.init_args.{expected}"


@pytest.mark.parametrize("stage", ["dpo", "rloo"])
def test_every_policy_can_be_pruned(chain, whole, tmp_path, stage):
    extra = ["--model.policy_path", whole, "--model.reference_path", whole, "--model.policy_layers", "[1]"]
    run = tmp_path / "run"
    assert chain.run("fit", stage, *extra, run=run) == 0
    assert load_model("policy_path", str(run / "checkpoints" / "last.ckpt")).config.n_layer == 1
