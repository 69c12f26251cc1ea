"""`export` writes a folder atomically and replaces only an earlier export."""

import hashlib
from pathlib import Path

import pytest
import torch
from runs import contents, one_line_of
from transformers import AutoModelForCausalLM

from lit_klrb.cli.main import main
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.loading import load_model


def export(chain, target, stage="sft", *more):
    return main(["export", "--ckpt_path", chain.checkpoint(stage), "--output_dir", str(target), *more])


@pytest.mark.parametrize("name", ["thesis.txt", "model.safetensors", ".git"])
def test_a_folder_that_is_not_an_export_is_kept(chain, tmp_path, capsys, name):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / name).write_text("mine")
    assert export(chain, tmp_path / "project") == 2
    line = f"error: output_dir: {tmp_path}/project contains {name} and is not an earlier export;"
    assert one_line_of(capsys).startswith(line)
    assert contents(tmp_path) == {f"project/{name}": b"mine"}


def test_weights_of_the_user_are_kept(chain, tmp_path, capsys):
    """A folder of save_pretrained has the files of an export, but not its card."""
    assert export(chain, tmp_path / "policy") == 0
    (tmp_path / "policy" / "README.md").unlink()
    before = contents(tmp_path)
    capsys.readouterr()
    assert export(chain, tmp_path / "policy", "dpo") == 2
    assert one_line_of(capsys).endswith("is not an earlier export; name a new folder")
    assert contents(tmp_path) == before


def test_one_file_more_keeps_an_export_too(chain, tmp_path, capsys):
    assert export(chain, tmp_path / "policy") == 0
    (tmp_path / "policy" / "notes.md").write_text("mine")
    before = contents(tmp_path)
    capsys.readouterr()
    assert export(chain, tmp_path / "policy", "dpo") == 2
    assert "contains notes.md and is not an earlier export" in one_line_of(capsys)
    assert contents(tmp_path) == before


def test_new_empty_linked_and_earlier_folders(chain, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "behind")
    for name in ("empty", "deep/new", "link"):
        assert export(chain, tmp_path / name) == 0
    first = contents(tmp_path / "empty")
    assert first == contents(tmp_path / "deep" / "new") == contents(tmp_path / "behind")
    assert (tmp_path / "link").is_symlink()
    assert export(chain, tmp_path / "empty", "dpo") == 0
    assert first.keys() == contents(tmp_path / "empty").keys()
    assert first["model.safetensors"] != contents(tmp_path / "empty")["model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "deep", "link", "behind"}
    # Its permissions are those of other files of the user.
    assert (tmp_path / "empty").stat().st_mode == (tmp_path / "deep").stat().st_mode
    AutoModelForCausalLM.from_pretrained(tmp_path / "link")


@pytest.mark.parametrize("earlier", [False, True])
def test_a_write_that_fails_leaves_what_was_there(chain, tmp_path, capsys, monkeypatch, earlier):
    if earlier:
        assert export(chain, tmp_path / "policy") == 0
    before = contents(tmp_path)

    rename = Path.rename

    def full(source, target):
        if source.name == "new":
            raise OSError(28, "No space left on device")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", full)
    capsys.readouterr()
    # Not 2: nothing is wrong with what the user gave
    assert export(chain, tmp_path / "policy", "dpo") == 1
    assert one_line_of(capsys) == "error: No space left on device"
    assert contents(tmp_path) == before


def test_a_flipped_bit_in_an_export_is_found(chain, tmp_path):
    assert export(chain, tmp_path) == 0
    weights, sums = tmp_path / "model.safetensors", tmp_path / "SHA256SUMS"
    assert sums.read_text() == f"{hashlib.sha256(weights.read_bytes()).hexdigest()}  model.safetensors\n"
    load_model("policy_path", str(tmp_path))

    raw, listed = bytearray(weights.read_bytes()), sums.read_text()
    raw[-100] ^= 1
    for changed, text in ((raw, listed), (weights.read_bytes(), listed.replace("model", "other"))):
        weights.write_bytes(changed)
        sums.write_text(text)
        with pytest.raises(ConfigurationError) as refusal:
            load_model("policy_path", str(tmp_path))
        assert str(refusal.value).startswith(
            f"policy_path: {tmp_path}: model.safetensors does not match its checksum in SHA256SUMS: "
        )
    sums.unlink()
    load_model("policy_path", str(tmp_path))


def dtypes_of(folder):
    return {str(weight.dtype) for weight in AutoModelForCausalLM.from_pretrained(folder).parameters()}


def test_the_dtype_is_said_and_what_rounding_undoes(chain, tmp_path, capsys):
    """A run from a file in bfloat16; both shares by a comparison of the folders."""
    start, run, prompts = tmp_path / "start", tmp_path / "run", tmp_path / "prompts.txt"
    assert export(chain, start, "sft", "--dtype", "bfloat16") == 0
    assert "; rounding changes" in capsys.readouterr().err
    slow = ["--model.learning_rate", "1e-5", "--model.schedule", "constant"]
    assert chain.run("fit", "rloo", "--model.policy_path", str(start), *slow, run=run) == 0
    prompts.write_text("The film\nThis plot\nA cast")
    command = ["export", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--output_dir"]
    capsys.readouterr()
    assert main([*command, str(tmp_path / "trained")]) == 0
    line = "weights in float32, trained in float32; --dtype auto writes bfloat16, as in the file"
    assert capsys.readouterr().err.startswith(line)
    assert main([*command, str(tmp_path / "auto"), "--dtype", "auto", "--prompts", str(prompts)]) == 0
    said = capsys.readouterr().err
    assert dtypes_of(tmp_path / "trained") == {"torch.float32"}
    assert dtypes_of(tmp_path / "auto") == {"torch.bfloat16"}
    folders = (start, tmp_path / "trained", tmp_path / "auto")
    before, trained, rounded = (flat(folder) for folder in folders)
    lost = ((trained != before) & (rounded == before)).sum() / (trained != before).sum()
    assert 0.1 < lost < 0.9
    changes = f"rounding changes {(trained != rounded).sum()} of them and undoes {lost:.1%} of the updates"
    assert f"weights in bfloat16, trained in float32; {changes}" in said
    assert "\nKL(trained‖exported) " in said
    assert "(3 prompts" in said


def flat(folder):
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).parameters()
    return torch.cat([weight.detach().flatten() for weight in weights])


def test_what_a_dtype_does_not_hold_is_refused(chain, tmp_path, capsys):
    path = tmp_path / "last.ckpt"
    content = torch.load(chain.checkpoint("sft"), weights_only=True)
    content["state_dict"]["policy.transformer.ln_f.bias"][0] = 1e5
    torch.save(content, path)
    command = [
        "export",
        "--ckpt_path",
        str(path),
        "--output_dir",
        str(tmp_path / "out"),
        "--dtype",
        "float16",
    ]
    assert main(command) == 2
    assert one_line_of(capsys) == "error: dtype: float16 does not hold the weight transformer.ln_f.bias"
    assert main([*command[:-1], "bfloat16"]) == 0
    # A model with new weights has no updates
    assert one_line_of(capsys).endswith(" of them")
    assert main([*command[:-1], "bfloat16", "--adapter", "--prompts", "p.txt"]) == 2
    assert one_line_of(capsys).startswith("error: prompts: not with --adapter")
