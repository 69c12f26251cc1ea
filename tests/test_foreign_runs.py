"""Every example of docs/foreign_runs.md works as written."""

import json
import re
import shlex
from pathlib import Path

import pytest

from analysis.cli.main import main

PAGE = (Path(__file__).parents[1] / "docs" / "foreign_runs.md").read_text("utf-8")
MAPPINGS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^lit-klrb import .*$", PAGE, re.MULTILINE)]


def table(folder):
    (folder / "theirs.csv").write_text(re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1])


def states_of_trl(folder):
    for arm in ("rloo", "grpo"):
        (folder / "logs" / f"{arm}-0.05-1").mkdir(parents=True)
        history = [{"step": step, "reward": step / 7, "kl": 1.0} for step in (1, 2)]
        (folder / "logs" / f"{arm}-0.05-1" / "trainer_state.json").write_text(
            json.dumps({"log_history": history})
        )


def panel(folder):
    names = [
        f"{run} - objective/{name}" for run in ("fluffy-cloud-1", "misty-sea-2") for name in ("reward", "kl")
    ]
    rows = [["Step", *names], ["0", "0.1", "1.0", "0.2", "1.1"], ["10", "0.3", "2.0", "0.4", "2.1"]]
    (folder / "wandb.csv").write_text("\n".join(",".join(row) for row in rows))


@pytest.mark.parametrize("place", range(3))
def test_an_example_is_read_as_a_sweep(place, tmp_path, monkeypatch):
    (table, states_of_trl, panel)[place](tmp_path)
    (tmp_path / "my_mapping.yaml").write_text(MAPPINGS[place])
    monkeypatch.chdir(tmp_path)
    assert main(COMMANDS[place]) == 0
    assert main(["report", COMMANDS[place][-1]]) == 0
    numbers = json.loads((tmp_path / COMMANDS[place][-1] / "results.json").read_text())
    assert len(numbers["arms"]) == 2
