"""Folders as people publish them: shards, tied heads, quantised weights, other vocabularies, sampling."""

import json
import re

import pytest
import torch
from gguf_files import llama
from runs import one_line_of
from written import save

from lit_klrb import terminal
from lit_klrb.cli.main import main
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.models.loading import load_model

TINY = [
    "--data.train_size",
    "8",
    "--data.eval_size",
    "4",
    "--data.batch_size",
    "4",
    "--trainer.max_steps",
    "1",
]
SHORT = ["--model.max_new_tokens", "4", "--trainer.enable_progress_bar", "false"]


def folder_with(path, rows=None, tied=False, **config):
    """A folder of a small model with the grammar's tokenizer, and further entries of its configuration."""
    tokenizer = grammar_tokenizer()
    save(path, llama(rows or len(tokenizer), tied=tied).bfloat16(), tokenizer)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, **config}))
    return str(path)


def argv(stage, path, run):
    key = {"sft": ["policy_path"], "reward": ["backbone_path"], "rloo": ["policy_path", "reference_path"]}[
        stage
    ]
    models = [word for name in key for word in (f"--model.{name}", path)]
    short = SHORT if stage == "rloo" else SHORT[2:]
    return [
        "--config",
        f"configs/demo/{stage}.yaml",
        *models,
        *TINY,
        *short,
        "--trainer.default_root_dir",
        str(run),
    ]


@pytest.mark.parametrize("command", ["check", "fit"])
@pytest.mark.parametrize("stage", ["sft", "reward", "rloo"])
def test_more_tokens_than_rows_are_refused(tmp_path, capsys, command, stage):
    size = len(grammar_tokenizer())
    path = folder_with(tmp_path / "model", rows=size - 2)
    capsys.readouterr()  # a progress bar
    assert main([command, *argv(stage, path, tmp_path / "run")]) == 2
    key = {"reward": "backbone_path"}.get(stage, "policy_path")
    message = (
        f"{key}: {path}: its tokenizer has 2 tokens more than its embedding has rows, {size - 2}, such as"
    )
    assert message in one_line_of(capsys)
    assert (
        main([command, *argv(stage, folder_with(tmp_path / "padded", rows=size + 8), tmp_path / "run")]) == 0
    )


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        ({"quant_method": "gptq", "bits": 8}, "gptq, 8 bits"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
@pytest.mark.parametrize("command", ["check", "fit"])
def test_quantised_weights_are_refused(tmp_path, capsys, command, settings, method):
    path = folder_with(tmp_path / "model", quantization_config=settings)
    capsys.readouterr()
    assert main([command, *argv("rloo", path, tmp_path / "run")]) == 2
    assert f"policy_path: {path}: its weights are quantised ({method})" in one_line_of(capsys)


@pytest.mark.parametrize("command", ["check", "fit"])
def test_a_samplers_settings_are_said_to_be_unused(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr(terminal, "_SAID", set())
    path = folder_with(tmp_path / "model")
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(asked))
    assert main([command, *argv("rloo", path, tmp_path / "run")]) == 0
    line = f"the generation_config of {path} has temperature 0.6, top_p 0.95, top_k 20, which is not used: "
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_shards_are_read_as_one_file(tmp_path, capsys, tied):
    path = folder_with(tmp_path / "whole", tied=tied)
    model = load_model("policy_path", path)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    grammar_tokenizer().save_pretrained(tmp_path / "shards")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 3
    sharded = load_model("policy_path", str(tmp_path / "shards"))
    assert (sharded.lm_head.weight is sharded.model.embed_tokens.weight) == tied
    for name, weight in model.state_dict().items():
        assert torch.equal(sharded.state_dict()[name], weight)
    run = tmp_path / "run"
    assert main(["fit", *argv("sft", str(tmp_path / "shards"), run)]) == 0
    assert re.search(r"policy float32 \(file: bfloat16\)", capsys.readouterr().out)
