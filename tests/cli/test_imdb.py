"""The configurations for real reviews run, on generated reviews and small models of the same kind."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from written import save, write_rows

from analysis.design import expand, read_plan
from analysis.design.cells import RUNS
from lit_klrb.cli.main import main
from lit_klrb.data.tokenizer import train_bpe
from lit_klrb.models import loading

CONFIGS = Path(__file__).parents[2] / "configs"
WORDS = ["the", "film", "was", "good", "bad", "plot", "I", "liked", "hated", "it", "never", "again", "acting"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of reviews like IMDB's, a GPT-2 and a DistilBERT classifier; LIT_KLRB_IMDB names the first."""
    root = tmp_path_factory.mktemp("imdb")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=30)) + f" {number}" for number in range(300)]
    for split, some in (("train", texts[:200]), ("test", texts[200:])):
        rows = ({"text": text, "label": int("good" in text)} for text in some)
        write_rows(root / "reviews" / f"{split}.jsonl", rows)
    write_rows(root / "reviews" / "unsupervised.jsonl", ({"text": f"{text} again"} for text in texts[:200]))
    tokenizer = train_bpe(texts, 300)
    policy = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    reward = {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
    save(root / "policy", loading.fresh_model(policy, tokenizer, 0), tokenizer)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    classifier = loading.fresh_model({**reward, **labels}, tokenizer, 0, loading.CLASSIFIER)
    save(root / "reward", classifier, tokenizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIT_KLRB_IMDB", str(root / "reviews"))
        yield root


def fit(config, *extra):
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    return main(["fit", "--config", str(CONFIGS / config), *quiet, *extra])


def test_the_papers_plan_runs_on_stand_ins(world, tmp_path, monkeypatch):
    """The plan has not been run at its size; here, each stage and the first run of the grid."""
    monkeypatch.chdir(CONFIGS.parent)
    plan = read_plan(CONFIGS / "imdb" / "sweep.yaml")
    sizes = {"eval_size": 4, "train_size": 8, "batch_size": 4}
    small = {
        **{f"data.init_args.{key}": value for key, value in sizes.items()},
        "model.init_args.reference_path": str(world / "policy"),
        "model.init_args.reward_path": str(world / "reward"),
        **{"trainer.max_steps": 4, "trainer.val_check_interval": 4, "trainer.accelerator": "cpu"},
    }
    for stage in plan.stages.values():
        stage.overrides.update(small)
    dpo, rloo = expand(plan).cells[:2]
    for cell in (dpo, rloo):
        where = tmp_path / "cells" / cell.id
        where.mkdir(parents=True)
        (where / "stage.yaml").write_text(yaml.safe_dump(cell.config))
        assert main([argument.replace(RUNS, str(tmp_path)) for argument in cell.argv]) == 0
    final = json.loads((where / "summary.json").read_text())["final"]
    assert 0 < final["length"] <= 53


def chain(name, checkpoint):
    """The stages of a folder of configurations, with small models and the checkpoints they start from."""
    small, tokenizer = "--model.policy_config.n_embd", ["--model.tokenizer_path", checkpoint("sft")]
    dpo = ["--model.reference_path", checkpoint("sft"), "--model.reward_path", checkpoint("reward")]
    last = {"dpo": dpo, "rloo": [*dpo, "--model.policy_path", checkpoint("dpo")]}
    sft = {"sft": [small, "16", "--model.vocab_size", "300"]}
    if name == "imdb_small":
        return {**sft, "reward": ["--model.classifier_config.dim", "16", *tokenizer], **last}
    backbone = ["--model.backbone_path", checkpoint("pretraining")]
    last["../../../configs/imdb_small/rloo"] = last.pop("rloo")
    return {**sft, "pretraining": [small, "8", *tokenizer], "reward": backbone, **last}


@pytest.mark.parametrize("name", ["imdb_small", "imdb_night"])
def test_a_chain_runs_from_nothing(world, tmp_path, name):
    def checkpoint(stage):
        return str(tmp_path / stage / "checkpoints" / "last.ckpt")

    for stage, extra in chain(name, checkpoint).items():
        sizes = ["--data.eval_size", "8", "--data.train_size", "16", "--data.batch_size", "4"]
        steps = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
        where = ["--trainer.default_root_dir", str(tmp_path / Path(stage).name)]
        folder = name if name == "imdb_small" else f"../replication/configs/{name}"
        assert fit(f"{folder}/{stage}.yaml", *extra, *sizes, *steps, *where) == 0
    assert len(loading.load_tokenizer("key", checkpoint("rloo"))) == 300


def test_without_the_variable_the_hub_is_asked(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("LIT_KLRB_IMDB", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    where = ["--trainer.default_root_dir", str(tmp_path)]
    assert fit("imdb_small/sft.yaml", *where) == 2
    assert "data.init_args.source: stanfordnlp/imdb cannot be read" in capsys.readouterr().err


def test_the_papers_size_needs_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nexit 9\n')
    python.chmod(0o755)
    (tmp_path / ".runtime").touch()
    command = ["make", "--silent", "reproduce-paper", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=CONFIGS.parent, capture_output=True, text=True, check=False)
    message = "reproduce-paper needs a GPU, and torch finds none on this machine: nothing was run\n"
    assert (done.returncode, done.stdout) == (2, message)
