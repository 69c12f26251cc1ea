"""The model card of an export, and adapters."""

import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from lit_klrb.cli.main import main
from lit_klrb.models.loading import load_model
from lit_klrb.run.card import MARK, model_card


def export(chain, target, *more, stage="rloo"):
    return main(["export", "--ckpt_path", chain.checkpoint(stage), "--output_dir", str(target), *more])


def test_the_card_states_reference_estimator_beta_and_kl(chain, tmp_path):
    assert export(chain, tmp_path / "policy") == 0
    card = (tmp_path / "policy" / "README.md").read_text("utf-8")
    final = json.loads((chain.root / "rloo" / "summary.json").read_text("utf-8"))["final"]
    assert f"| reference | {chain.checkpoint('sft')} |" in card
    assert "| trained by | RLOOModule of lit_klrb |" in card
    assert "| KL estimator | RaoBlackwellControlVariate |" in card
    assert "| reward | grammar |" in card
    ends = [f"{final['kl'] + side * 1.96 * final['kl_se']:.4g}" for side in (-1, 1)]
    assert f"| {final['kl']:.4g} ({ends[0]} to {ends[1]}) |" in card
    assert "| evaluation prompts | 8 |" in card
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "base_model" not in card  # a local path is no name on the hub


def test_the_kl_of_other_weights_is_not_quoted(chain, tmp_path):
    checkpoint = torch.load(chain.checkpoint("rloo"), map_location="cpu", weights_only=True)
    assert "nats" not in model_card(checkpoint, chain.root / "rloo", "0" * 64)
    assert "nats" not in model_card(checkpoint, tmp_path, "0" * 64)


def test_a_reference_on_the_hub_is_the_base_model():
    run = {
        "settings": {"model": {"class_path": "x.RLOOModule", "init_args": {"reference_path": "owner/gpt"}}}
    }
    card = model_card({"run": run}, Path("none"), "")
    assert "base_model: owner/gpt\n---\n" in card
    run["settings"]["model"]["init_args"]["reference_path"] = "owner/gpt\nlicense: mit"
    assert "base_model" not in model_card({"run": run}, Path("none"), "")


def test_the_hub_reads_licence_library_and_the_student_as_base(chain, tmp_path, capsys):
    arguments = {"reference_path": "owner/teacher", "policy_path": "owner/student"}
    run = {"settings": {"model": {"class_path": "x.DistillModule", "init_args": arguments}}}
    data = ModelCard(model_card({"run": run}, Path("none"), "", "apache-2.0", adapter=True)).data
    assert (data.library_name, data.license, data.base_model) == ("peft", "apache-2.0", "owner/student")
    arguments["policy_path"] = "runs/distill/checkpoints/last.ckpt"
    assert "base_model" not in model_card({"run": run}, Path("none"), ""), "a teacher is no base"
    assert export(chain, tmp_path / "policy", "--license", "mit") == 0
    assert ModelCard.load(tmp_path / "policy" / "README.md").data.license == "mit"
    assert export(chain, tmp_path / "other", "--license", "a: b") == 2
    assert "license: a: b: a name of the hub's list is expected" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["true", "null", "../x", "runs/policy"])
def test_a_path_is_no_name_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "policy").mkdir(parents=True)
    run = {"settings": {"model": {"class_path": "x.RLOOModule", "init_args": {"reference_path": name}}}}
    assert "base_model" not in model_card({"run": run}, Path("none"), "")


def test_what_a_checkpoint_says_is_text_in_its_card():
    hostile = "`|<script>alert(1)</script>\r\n---\u2028[x](javascript:alert(1))\x1b[2J&lt;"
    arguments = {"reference_path": hostile, "policy_path": hostile, "reward_path": hostile}
    settings = {
        "model": {"class_path": hostile, "init_args": arguments},
        "kl": {"estimator": hostile, "beta": hostile},
    }
    settings["data"] = {"init_args": {"source": hostile}}
    card = model_card({"run": {"settings": settings}, "global_step": hostile}, Path("none"), "")
    metadata, _, body = card.partition(MARK)
    assert metadata == "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
    expected = r"\`\|\<script>alert(1)\</script> --- \[x](javascript:alert(1))\\x1b\[2J\&lt;"
    rows = body.splitlines()[4:]
    assert rows[2:] == [f"| {row.split(' | ')[0][2:]} | {expected} |" for row in rows[2:]]
    assert len(rows) == 9
    assert len(model_card({"global_step": 9999 * "x"}, Path("none"), "")) < 1000


@pytest.mark.parametrize("kind", ["pipe", "device", "deep"])
def test_a_summary_that_is_none_is_not_quoted(tmp_path, kind):
    summary = tmp_path / "summary.json"
    if kind == "pipe":
        os.mkfifo(summary)
    elif kind == "device":
        summary.symlink_to("/dev/zero")
    else:
        summary.write_text(200_000 * "[")
    assert "nats" not in model_card({}, tmp_path, "")


def test_an_export_is_replaced_with_its_card_but_not_with_a_users(chain, tmp_path, capsys):
    target = tmp_path / "policy"
    assert export(chain, target) == export(chain, target, stage="dpo") == 0
    (target / "README.md").write_text("mine")
    assert export(chain, target) == 2
    assert "contains README.md and is not an earlier export" in capsys.readouterr().err
    assert (target / "README.md").read_text() == "mine"


def test_an_adapter_is_exported_alone(chain, tmp_path, capsys):
    pytest.importorskip("peft")
    lora = ("--model.lora.r", "2", "--model.policy_path", chain.checkpoint("sft"), "--trainer.max_steps", "1")
    lora += ("--trainer.val_check_interval", "1", "--model.inner_epochs", "1")
    assert chain.run("fit", "rloo", *lora, run=tmp_path / "run") == 0
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    arguments = ["export", "--ckpt_path", checkpoint, "--output_dir", str(tmp_path / "adapter"), "--adapter"]
    assert main(arguments) == main(arguments) == 0
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= names
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == chain.checkpoint("sft")
    policy = load_model("policy_path", checkpoint)
    base = load_model("policy_path", chain.checkpoint("sft"))
    base.load_adapter(str(tmp_path / "adapter"))
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(base.eval()(tokens).logits, policy.eval()(tokens).logits)
    assert export(chain, tmp_path / "other", "--adapter") == 2
    assert "adapter: " in capsys.readouterr().err
