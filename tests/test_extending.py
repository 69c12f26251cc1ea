"""Every example of docs/extending.md works as written."""

import importlib
import math
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from runs import rows_of
from single_steps import attached

import analysis.cli
from lit_klrb.cli.main import main
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate
from lit_klrb.functional import TokenStats
from lit_klrb.models.loading import TOKEN_VALUES_KEY
from lit_klrb.models.rollout import Rollout
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
COMMANDS = [line.removeprefix("lit-klrb ") for line in re.findall(r"^lit-klrb .*$", PAGE, re.MULTILINE)]


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
        shown = "c_t = r_t + sum_{s>t} KL_s" if "OwnAndFuture" in command else "3\t3\t1.000\t0.000\t1.000"
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
    assert metrics[0][0] == metrics[1][0]
    assert [len(set(explained)) for explained in metrics] == [2, 2]
    assert not torch.equal(*scores)


@pytest.mark.parametrize("estimator", [MonteCarlo(), RaoBlackwell()])
@pytest.mark.parametrize("rewards", [[0, 1, 1, 0, 0, 1], [0.7] * 6, [0.3, -2.0, 1.1, 4.0, 4.5, 4.1]])
def test_the_grpo_of_the_page_scales_the_advantage_and_leaves_the_kl(chain, tmp_path, estimator, rewards):
    module, _ = attached(chain, tmp_path, estimator, kind=importlib.import_module("my_modules").GRPOModule)
    generator = torch.Generator().manual_seed(0)
    logprobs, kl = -torch.rand(6, 4, generator=generator), torch.rand(6, 4, generator=generator)
    stats, rewards = TokenStats(logprobs, logprobs - kl.flip(0), kl, None), torch.tensor(rewards).float()
    mask = torch.ones(6, 4, dtype=torch.bool)
    rollout = Rollout(torch.zeros(6, 5, dtype=torch.long), torch.ones(6, 5, dtype=torch.bool), mask)
    weights = module.weigh(rollout, stats, rewards)
    kl_alone = estimator.weights(stats, mask, beta=0.3, group_size=3)
    advantages = torch.cat([(group - group.mean()) / (group.std() + 1e-4) for group in rewards.split(3)])
    torch.testing.assert_close(weights.score, kl_alone.score - advantages[:, None])
    assert torch.equal(weights.kl, kl_alone.kl)
    if rewards.unique().numel() == 1:
        assert torch.equal(weights.score, kl_alone.score)


def test_the_loss_of_the_page_is_a_plain_loop_over_tokens(chain, tmp_path):
    kind = importlib.import_module("my_losses").ClipHigherModule
    module, batch = attached(chain, tmp_path, None, kind=kind, inner_epochs=2)
    module.training_step(batch, 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.policy.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    loss = module.training_step(batch, 1)
    part = module.experience
    stats, old = module.pair.scorer.stats(part.rollout, part.reference_states), part.behaviour_logprobs
    total, tokens, clipped = 0.0, 0, set()
    for row, tokens_of_row in enumerate(part.rollout.mask.sum(1).tolist()):
        others = [part.rewards[i].item() for i in range(row // 3 * 3, row // 3 * 3 + 3) if i != row]
        advantage = part.rewards[row].item() - sum(others) / 2
        tokens += tokens_of_row
        for t in range(tokens_of_row):
            ratio = (stats.logprobs[row, t] - old[row, t]).exp().item()
            gain = min(advantage * ratio, advantage * min(max(ratio, 0.8), 1.28))
            clipped.add((ratio < 0.8) - (ratio > 1.28))
            log_ratio = (stats.logprobs[row, t] - stats.ref_logprobs[row, t]).item()
            total += 0.3 * (log_ratio + math.exp(-log_ratio) - 1) - gain
    assert clipped == {-1, 0, 1}
    assert loss.item() == pytest.approx(total / tokens, rel=1e-4)


@pytest.mark.usefixtures("plans_checked_here")
def test_a_run_with_a_loss_of_ones_own_records_no_estimator(chain, tmp_path, capsys):
    model = ["--model", "my_losses.ClipHigherModule"]
    assert main(["check", *chain.commands.argv("fit", "rloo", *model)[1:]]) == 0
    assert "estimator: none, as ClipHigherModule uses none\n" in capsys.readouterr().out
    runs = [tmp_path / name for name in ("one", "other")]
    for run, name in zip(runs, ("RaoBlackwell", "NoKL"), strict=True):
        own = [*model, "--kl.estimator", name, "--kl.estimator.off_policy", "prefix", "--kl.beta", "0.4"]
        assert chain.run("fit", "rloo", *own, run=run) == 0
    assert "ClipHigherModule uses no KL estimator; ignored: kl.estimator\n" in capsys.readouterr().out
    assert rows_of(runs[0]) == rows_of(runs[1])
    assert yaml.safe_load((runs[0] / "config.yaml").read_text())["kl"]["beta"] == 0.4
    assert "estimator" not in (runs[0] / "config.yaml").read_text()
    plan = {
        "name": "losses",
        "directory": "runs",
        "stages": {"rloo": {"config": str(runs[0] / "config.yaml")}},
        "grid": {"arms": ["MonteCarlo", "RaoBlackwell"], "beta": {0: 0.1}, "replicates": 2},
        "primary": {"control": "MonteCarlo"},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert analysis.cli.main(["plan", "--config", "plan.yaml"]) == 2
    line = "grid.arms.MonteCarlo: ClipHigherModule uses no KL estimator, so it ignores kl.estimator"
    assert line in capsys.readouterr().err
