"""Every configuration runs, and documents each of its keys."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from runs import assert_same_run

from lit_klrb.cli.lightning import LitCLI

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "configs", ROOT / "replication" / "configs")
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.yaml"))
FITS = [path for path in FILES if "\nstages:" not in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_key_has_a_comment_above_it(path):
    lines = path.read_text().splitlines()
    keys = [
        number
        for number, line in enumerate(lines)
        if line.strip() and not line.lstrip().startswith(("#", "-"))
    ]
    structure = ("class_path:", "init_args:", "model:", "data:", "trainer:")
    for number in keys:
        line = lines[number].strip()
        before = lines[number - 1].strip() if number else ""
        if line.startswith(structure) or before.startswith("#"):
            continue
        # A second key may share the comment of the first: "shortest and longest"; arms of one line may, too.
        above = [text.strip() for text in lines[:number]]
        while above and re.fullmatch(r"\S+: {.*}", line) and re.fullmatch(r"\S+: {.*}", above[-1]):
            above.pop()
        assert any(text.startswith("#") for text in above[-2:]), f"{path.name}:{number + 1}: {line}"


@pytest.mark.parametrize("path", FITS, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_names_a_run_directory_of_its_own(path):
    config = OmegaConf.load(path)
    assert config.trainer.default_root_dir == f"runs/{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("stage", ["sft", "dpo", "rloo", "reward", "distill"])
def test_it_runs(chain, stage, tmp_path):
    assert chain.run("fit", stage, "--trainer.fast_dev_run", "true", run=tmp_path / "run") == 0
    assert not (tmp_path / "run").exists()


def test_the_written_configuration_is_what_the_parser_writes(chain, tmp_path, monkeypatch):
    """Which converts and checks all settings again, and so takes as long as parsing them."""
    original, texts = LitCLI._config_text, []

    def both(self):
        options = {"skip_none": False, "skip_validation": True}
        texts.extend((original(self), self._parser("fit").dump(self.config["fit"], **options)))
        return texts[0]

    monkeypatch.setattr(LitCLI, "_config_text", both)
    run = tmp_path / 'a "run" of é'
    assert chain.run("fit", "rloo", "--trainer.max_steps", "1", "--kl.estimator", "MonteCarlo", run=run) == 0
    assert texts[0] == texts[1] == (run / "config.yaml").read_text("utf-8")


def test_the_written_configuration_makes_the_same_run(chain, tmp_path):
    from lit_klrb.cli.main import main

    written = yaml.safe_load((chain.root / "rloo" / "config.yaml").read_text())
    written["trainer"]["default_root_dir"] = str(tmp_path / "again")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    assert main(["fit", "--config", str(tmp_path / "config.yaml")]) == 0
    assert_same_run(chain.root / "rloo", tmp_path / "again")
