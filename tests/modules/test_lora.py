"""LoRA: trained parameters, the reference, and training from its checkpoints."""

import pytest
import torch
from runs import logged
from transformers import AutoModelForCausalLM

from lit_klrb.cli.export import export_checkpoint
from lit_klrb.models import loading
from lit_klrb.models.adapters import adapter_off, adapter_settings

LORA = ["--model.lora", "{r: 4, lora_alpha: 8, init_lora_weights: true}"]
OFF = ["--model.reference_path", "null"]
FAST = ["--model.learning_rate", "0.01"]


@pytest.fixture(scope="module")
def dpo(chain, tmp_path_factory):
    """A DPO run that trained an adapter on the reference."""
    run = tmp_path_factory.mktemp("lora") / "dpo"
    assert chain.run("fit", "dpo", *LORA, *FAST, run=run) == 0
    return run


def checkpoint(run):
    return str(run / "checkpoints" / "last.ckpt")


def policy(path):
    return loading.load_model("path", path).eval()


def test_the_adapter_is_trained_and_nothing_else(chain, dpo):
    before = policy(chain.checkpoint("sft")).state_dict()
    trained = policy(checkpoint(dpo))
    assert adapter_settings(trained)["r"] == 4
    for name, value in trained.state_dict().items():
        base = name.replace(".base_layer", "")
        if "lora_" not in name:
            assert torch.equal(value, before[base]), name
        elif "lora_B" in name:
            assert value.abs().max() > 0, name  # zero at the start
    names = [name for name, parameter in trained.named_parameters() if parameter.requires_grad]
    assert names
    assert all("lora_" in name for name in names)


def test_rloo_on_a_lora_checkpoint_keeps_the_reference_whichever_way_it_is_named(chain, dpo, tmp_path):
    start = ["--model.policy_path", checkpoint(dpo), *FAST]
    assert chain.run("fit", "rloo", *start, run=tmp_path / "named") == 0
    assert chain.run("fit", "rloo", *start, *OFF, run=tmp_path / "off") == 0
    named, off = ([*logged(tmp_path / name, "val/kl").values()] for name in ("named", "off"))
    assert named[0] == pytest.approx([*logged(dpo, "val/kl").values()][-1], rel=1e-4)
    assert named[0] > 1e-3
    assert off == pytest.approx(named, rel=1e-3, abs=1e-5)
    first, second = (policy(checkpoint(tmp_path / name)).state_dict() for name in ("named", "off"))
    assert all(torch.allclose(first[key], second[key], atol=1e-4) for key in first)
    untouched = policy(checkpoint(dpo)).state_dict()
    assert any(not torch.equal(first[key], untouched[key]) for key in first if "lora_" in key)


def test_a_run_with_an_adapter_resumes_bit_for_bit(chain, dpo, tmp_path):
    start = ["--model.policy_path", checkpoint(dpo), *OFF, "--model.schedule", "constant"]
    assert chain.run("fit", "rloo", *start, run=tmp_path / "straight") == 0
    assert chain.run("fit", "rloo", *start, "--trainer.max_steps", "3", run=tmp_path / "stopped") == 0
    resumed = ["--ckpt_path", checkpoint(tmp_path / "stopped")]
    assert chain.run("fit", "rloo", *start, *resumed, run=tmp_path / "stopped") == 0
    first, second = (policy(checkpoint(tmp_path / name)).state_dict() for name in ("straight", "stopped"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_an_export_has_the_adapter_merged(dpo, tmp_path):
    export_checkpoint(checkpoint(dpo), str(tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert adapter_settings(plain) is None
    trained, tokens = policy(checkpoint(dpo)), torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(plain(tokens).logits, trained(tokens).logits, atol=1e-5)
        with adapter_off(trained) as reference:
            assert not torch.allclose(plain(tokens).logits, reference(tokens).logits, atol=1e-3)
        assert torch.allclose(plain(tokens).logits, trained(tokens).logits, atol=1e-5)


def test_a_second_adapter_is_refused(chain, dpo, tmp_path, capsys):
    start = ["--model.policy_path", checkpoint(dpo)]
    assert chain.run("fit", "rloo", *start, *LORA, run=tmp_path) == 2
    assert "the policy already has an adapter" in capsys.readouterr().err
