"""Every example of docs/extending.md works as written."""

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from single_steps import attached

from lit_klrb.cli.main import main
from lit_klrb.estimators import RaoBlackwellControlVariate
from lit_klrb.models.loading import TOKEN_VALUES_KEY
from lit_klrb.modules import RLOOModule

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text("utf-8")
FILES = {match[1]: match[0] for match in re.finditer(r"# (my_\w+\.py)\n.*?(?=```)", PAGE, re.DOTALL)}
# As an installer writes them
ENTRY_POINTS = [
    f"[{group}]\n{name} = {value}"
    for group, name, value in re.findall(
        r'^\[project.entry-points."(.+)"\]\n(\S+) = "(.+)"$', PAGE, re.MULTILINE
    )
    if group.startswith("lit_klrb.")
]
COMMANDS = [
    line.removeprefix("python -m lit_klrb ")
    for line in re.findall(r"^python -m lit_klrb .*$", PAGE, re.MULTILINE)
]


@pytest.fixture(autouse=True)
def extensions(tmp_path, monkeypatch):
    """The files of the page, importable during a test."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, "utf-8")
    installed = tmp_path / "my_package-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: my-package\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("\n".join(ENTRY_POINTS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"^python (my_\w+\.py)$", PAGE, re.MULTILINE):
        runpy.run_path(name, run_name="__main__")
    yield
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(chain, tmp_path, capsys, command):
    kind, *arguments = shlex.split(command, comments=True)
    if kind == "explain":
        assert main([kind, *arguments]) == 0
        shown = "c_t = r_t + sum_{s>t} KL_s" if "OwnAndFuture" in command else "3\t3\t1.000\t1.000"
        assert shown in capsys.readouterr().out
        return
    if kind == "count":
        assert main([kind, *arguments]) == 0
        assert capsys.readouterr().out == f"{len(FILES['my_commands.py'].split())}\n"
        assert main(["--help"]) == 0
        assert "count       added by my_commands:count" in capsys.readouterr().out
        return
    assert arguments[:2] == ["--config", "configs/demo/rloo.yaml"]
    assert chain.run("fit", "rloo", *arguments[2:], run=tmp_path / "run") == 0
    if "LengthStudy" in command:
        assert (tmp_path / "run" / "studies" / "length.json").exists()


def test_a_module_of_ones_own_has_what_rloo_has(chain, tmp_path):
    """The warm start's token values, prefix rewards and the memory; its weights alone are its own."""
    checkpoint = torch.load(chain.checkpoint("dpo"), weights_only=True)
    torch.save(checkpoint | {TOKEN_VALUES_KEY: torch.linspace(-1, 1, 365)}, tmp_path / "dpo.ckpt")
    metrics, scores = [], []
    for kind in (RLOOModule, importlib.import_module("my_modules").GRPOModule):
        module, batch = attached(
            chain,
            tmp_path,
            RaoBlackwellControlVariate(),
            policy_path=str(tmp_path / "dpo.ckpt"),
            kind=kind,
            prefix_reward_every=4,
        )
        explained = []
        for number in range(2):
            module.training_step(batch, number)
            explained.append(module.experience.metrics["reward_explained"])
        metrics.append(explained)
        scores.append(module.experience.weights.score)
    assert metrics[0] == metrics[1]
    assert len(set(metrics[0])) == 2
    spread = module.experience.rewards.view(-1, 3).std(1).repeat_interleave(3)[:, None] + 1e-4
    torch.testing.assert_close(scores[1] * spread, scores[0])
