"""`export` writes a folder atomically and replaces only an earlier export."""

import hashlib
from pathlib import Path

import pytest
from runs import contents, one_line_of
from transformers import AutoModelForCausalLM

from lit_klrb.cli.main import main
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.loading import load_model


def export(chain, target, stage="sft"):
    return main(["export", "--ckpt_path", chain.checkpoint(stage), "--output_dir", str(target)])


@pytest.mark.parametrize("name", ["thesis.txt", "model.safetensors", ".git"])
def test_a_folder_that_is_not_an_export_is_kept(chain, tmp_path, capsys, name):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / name).write_text("mine")
    assert export(chain, tmp_path / "project") == 2
    line = f"error: output_dir: {tmp_path}/project contains {name} and is not an earlier export;"
    assert one_line_of(capsys).startswith(line)
    assert contents(tmp_path) == {f"project/{name}": b"mine"}


def test_one_file_more_keeps_an_export_too(chain, tmp_path, capsys):
    assert export(chain, tmp_path / "policy") == 0
    (tmp_path / "policy" / "notes.md").write_text("mine")
    before = contents(tmp_path)
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
