"""Malicious files in every argument that takes a file: exit code 2, one line, no effect."""

import json
import sys
from functools import partial

import pytest
import torch
from pickles import Touch

from lit_klrb.cli.main import main
from lit_klrb.run import cache
from lit_klrb.run.cache import cached


def crafted(source, path, **changes):
    content = torch.load(source, weights_only=True)
    torch.save({**content, **changes}, path)
    return str(path)


def reaches(chain, tmp_path, make):
    """Each command that reads a checkpoint of others, with one that `make` has changed."""
    policy = make(chain.checkpoint("sft"), tmp_path / "policy.ckpt")
    classifier = make(chain.checkpoint("reward"), tmp_path / "classifier.ckpt")
    export = ["export", "--ckpt_path", policy, "--output_dir", str(tmp_path / "out")]
    run = tmp_path / "run"
    return {
        "export": lambda: main(export),
        "policy_path": lambda: chain.run("fit", "rloo", "--model.policy_path", policy, run=run),
        "reference_path": lambda: chain.run("fit", "rloo", "--model.reference_path", policy, run=run),
        "tokenizer_path": lambda: chain.run("fit", "sft", "--model.tokenizer_path", policy, run=run),
        "reward_path": lambda: chain.run("fit", "rloo", "--model.reward_path", classifier, run=run),
        "classifier_path": lambda: chain.run(
            "fit",
            "reward",
            *("--model.classifier_config", "null", "--model.classifier_path", classifier),
            run=run,
        ),
        "backbone_path": lambda: chain.run(
            "fit", "reward", *("--model.classifier_config", "null", "--model.backbone_path", policy), run=run
        ),
        "ckpt_path": lambda: chain.run("validate", "sft", "--ckpt_path", policy, run=run),
    }


REACHES = [
    *("export", "policy_path", "reference_path", "tokenizer_path"),
    *("reward_path", "classifier_path", "backbone_path", "ckpt_path"),
]


@pytest.mark.parametrize("reach", REACHES)
def test_a_checkpoint_made_of_python_objects(chain, tmp_path, capsys, reach):
    def make(source, path):
        return crafted(source, path, elsewhere=Touch(tmp_path / "ran"))

    assert reaches(chain, tmp_path, make)[reach]() == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "damaged, or made of Python objects: loading those could run code" in line
    assert not (tmp_path / "ran").exists()


def test_a_weight_that_is_not_finite_is_refused(chain, tmp_path, capsys):
    state = torch.load(chain.checkpoint("sft"), weights_only=True)["state_dict"]
    name = next(iter(state))
    path = crafted(
        chain.checkpoint("sft"), tmp_path / "a.ckpt", state_dict={**state, name: state[name] * torch.nan}
    )
    assert chain.run("fit", "rloo", "--model.policy_path", path, run=tmp_path / "run") == 2
    assert "has values that are not finite" in capsys.readouterr().err


def test_hyper_parameters_are_not_instantiated(chain, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    changed = {"_class_path": "evil.Module", "_instantiator": "evil.make"}
    path = crafted(chain.checkpoint("sft"), tmp_path / "a.ckpt", hyper_parameters=changed)
    assert chain.run("validate", "sft", "--ckpt_path", path, run=tmp_path / "run") == 0
    assert "evil" not in sys.modules


def test_a_cache_holds_no_code(tmp_path, monkeypatch):
    """A cache file with anything but tensors, numbers and text is recomputed."""
    monkeypatch.setenv("LIT_KLRB_CACHE", str(tmp_path))
    assert cached("numbers", {"of": 3}, lambda: [1, 2, 3]) == [1, 2, 3]
    (path,) = tmp_path.glob("numbers-*.pt")
    torch.save(Touch(tmp_path / "ran"), path)
    assert cached("numbers", {"of": 3}, lambda: [4]) == [4]
    assert not (tmp_path / "ran").exists()


def test_other_code_computes_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_KLRB_CACHE", str(tmp_path / "cache"))
    module = tmp_path / "package" / "run" / "cache.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(cache, "__file__", str(module))
    found = []
    for result, code in enumerate(("a = 1", "a = 1", "a = 2")):
        module.write_text(code)
        cache._code.cache_clear()
        found.append(cached("numbers", {}, partial(int, result)))
    cache._code.cache_clear()
    assert found == [0, 0, 2]


PROGRAM = """
seed_everything: 0
model: {class_path: theirs.Module}
data: {class_path: lit_klrb.data.modules.PromptDataModule}
"""


@pytest.mark.parametrize("how", ["class_path", "reward_path"])
def test_a_configuration_is_a_program(chain, tmp_path, monkeypatch, how):
    """Configurations name code that is imported and called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does with the current directory
    (tmp_path / "theirs.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    if how == "class_path":
        (tmp_path / "config.yaml").write_text(PROGRAM)
        assert main(["fit", "--config", "config.yaml"]) == 2
    else:
        assert chain.run("fit", "rloo", "--model.reward_path", "theirs:reward", run=tmp_path / "run") == 2
    assert (tmp_path / "ran").exists()


def test_data_are_rows_of_text(chain, tmp_path, capsys):
    """Only columns of text are read, whatever types a file declares."""
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps({"text": {"path": "/etc/passwd", "bytes": None}, "label": 1}) + "\n")
    assert chain.run("fit", "sft", "--data.source", str(source), run=tmp_path / "run") == 2
    assert "1 of 1 train rows cannot be read: 1 a dict as text" in capsys.readouterr().err
