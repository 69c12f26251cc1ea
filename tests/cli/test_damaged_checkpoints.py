"""A flipped bit in the weights of a checkpoint is detected by all readers."""

import json

import pytest
from runs import weights_of

from lit_klrb.cli.main import main
from lit_klrb.errors import ConfigurationError
from lit_klrb.modules import RewardModule, RLOOModule
from lit_klrb.run.checkpoints import digest


@pytest.fixture(scope="module")
def damaged(chain, tmp_path_factory):
    """Checkpoints with a flipped bit in a weight."""

    def damage(stage):
        path = tmp_path_factory.mktemp(stage) / f"{stage}.ckpt"
        weight = next(iter(weights_of(chain.root / stage).values())).numpy().tobytes()
        raw = bytearray((chain.root / stage / "checkpoints" / "last.ckpt").read_bytes())
        raw[raw.index(weight) + len(weight) // 2] ^= 1
        path.write_bytes(raw)
        return str(path)

    return {stage: damage(stage) for stage in ("sft", "rloo", "reward")}


@pytest.mark.parametrize(("kind", "stage"), [(RLOOModule, "rloo"), (RewardModule, "reward")])
def test_by_python(damaged, kind, stage):
    path = damaged[stage]
    with pytest.raises(ConfigurationError) as refusal:
        kind.load_from_checkpoint(path)
    assert str(refusal.value).startswith(f"checkpoint_path: {path}: damaged: ")
    assert str(refusal.value).endswith(" does not match its checksum")


@pytest.mark.parametrize(
    ("command", "key", "stage"),
    [
        ("fit", "model.policy_path", "rloo"),
        ("fit", "model.reference_path", "sft"),
        ("fit", "model.reward_path", "reward"),
        ("fit", "ckpt_path", "rloo"),
        ("validate", "ckpt_path", "rloo"),
    ],
)
def test_by_a_run(chain, damaged, tmp_path, capsys, command, key, stage):
    assert chain.run(command, "rloo", f"--{key}", damaged[stage], run=tmp_path / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = key.rpartition(".")[2]
    assert f"{name}: {damaged[stage]}: damaged: " in line
    assert not (tmp_path / "run").exists()


def test_by_an_export(damaged, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", "--ckpt_path", damaged["rloo"], "--output_dir", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: ckpt_path: {damaged['rloo']}: damaged: ")
    assert not out.exists()


def test_a_run_says_which_weights_it_ended_with(chain):
    for stage in ("sft", "rloo", "reward"):
        summary = json.loads((chain.root / stage / "summary.json").read_text())
        assert summary["weights_sha256"] == digest(weights_of(chain.root / stage))
