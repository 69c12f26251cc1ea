"""The commands `plan` and `sweep`, with cells that take milliseconds."""

import json
import os
import shlex
import signal
import time
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from sweep_project import session, wait_until

from analysis.cli import main
from analysis.cli.sweep import _unused
from analysis.results.store import read_result
from analysis.sweep import Progress, Store


def test_a_sweep_publishes_every_cell_once(finished):
    assert finished.code == 0, finished.output
    assert "plan: 10 cells: 10 done; 10 run now" in finished.output
    assert "[10/10] rloo " in finished.output
    paths = sorted((finished.directory / "plan" / "results").iterdir())
    assert len(paths) == len(finished.ran()) == 10
    for path in paths:
        result = read_result(path)
        assert result["state"] == "done"
        assert set(result["final"]) == {"reward", "kl"}
        assert result["curves"]["train/reward"]["step"] == [0, 1, 2]
        assert result["curves"]["val/kl"]["step"] == [2]
        assert set(result["curves"]) == {"train/reward", "val/kl"}
        assert str(finished.directory) not in path.read_text()


def test_a_second_sweep_runs_no_cell_and_ends_with_the_answer(swept):
    before = swept.results()
    assert swept.run("sweep", "--config", "plan.yaml") == (
        0,
        "plan: 10 cells: 10 done; no cell was run\n"
        "These runs are too few to tell RaoBlackwell from MonteCarlo; MonteCarlo gained −0.27 "
        "(−1.64 to 1.10) from 0.78 at the start\n"
        f"its page: lit-klrb report {swept.directory / 'plan'}\n",
    )
    assert swept.results() == before
    assert len(swept.ran()) == 10
    assert not (swept.directory / "plan" / "sft").is_symlink(), "a folder of one's own stays"


def test_results_do_not_depend_on_directory_or_number_of_workers(project, finished):
    assert project.run("sweep", "--config", project.write("other"), "--workers", 5)[0] == 0
    assert project.results("other") == finished.results()


def test_a_changed_result_is_named_and_nothing_is_run(swept, capsys):
    path = sorted((swept.directory / "plan" / "results").iterdir())[3]
    content = path.read_text()
    digit = content.index('"reward":0.') + len('"reward":0.')
    path.write_text(content[:digit] + str((int(content[digit]) + 1) % 10) + content[digit + 1 :])
    for command in ("plan", "sweep"):
        assert main([command, "--config", "plan.yaml"]) == 2
        message = f"error: {path}: does not match its checksum; it was changed after it was published\n"
        assert capsys.readouterr() == ("", message)


def delete_checkpoints(project):
    for checkpoint in (project.directory / "plan" / "cells").glob("*/checkpoints/last.ckpt"):
        checkpoint.unlink()


def test_a_larger_plan_runs_new_cells_and_those_with_lost_checkpoints(swept):
    before = swept.results()
    delete_checkpoints(swept)
    code, output = swept.run("sweep", "--config", swept.write(grid={"replicates": 3}))
    assert code == 0
    assert "changed since the plan was locked: plan.grid.replicates: 2 -> 3" in output
    # The reference, the warm start, and the four new cells.
    assert "14 cells: 14 done; 6 run now" in output
    assert before.items() < swept.results().items()

    delete_checkpoints(swept)
    code, output = swept.run("sweep", "--config", swept.write(grid={"replicates": 4}), FAKE_JOB="noise")
    assert code == 1
    refused = sorted((swept.directory / "plan" / "refused").iterdir())
    assert len(refused) == 2
    for path in refused:
        assert (
            f"not deterministic: {path} differs from the published result of the same cell in: curves, final"
            in output
        )
        assert read_result(path)["final"]["reward"] == 1 + json.loads(before[path.name])["final"]["reward"]
    assert before.items() < swept.results().items()


def interrupt(project, plan, send, *numbers):
    """Stop a sweep while two cells of the grid run; return its exit code and output."""
    process = project.start("sweep", "--config", plan, "--workers", 2)
    metrics = project.directory / "plan" / "cells"
    wait_until(lambda: sum(path.read_text().count("\n1,") for path in metrics.rglob("metrics.csv")) == 4)
    for number in numbers:
        send(process.pid, number)
        time.sleep(0.1)
    code, output = process.ended(30)
    wait_until(lambda: not session(process.pid), seconds=5)
    assert "Traceback" not in output
    assert len(project.results()) == 2
    return code, output


# They wait to be interrupted.
WAITING = {"rloo": {"waits": True}, "grid": {"replicates": 1, "beta": {0: 0.1}}}


@pytest.mark.parametrize(("number", "damaged"), [(signal.SIGINT, 0), (signal.SIGTERM, 1)])
def test_a_stopped_sweep_saves_its_cells_and_resumes_them(project, finished, number, damaged):
    """A cell with a damaged checkpoint starts from scratch."""
    plan = project.write(**WAITING)
    # A terminal sends Ctrl-C to the whole group, and managers of services do so with SIGTERM.
    code, output = interrupt(project, plan, os.killpg, number)
    assert code == 128 + number, output
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    command = f"lit-klrb sweep --config {plan} --workers 2"
    assert output.endswith(f"stopped by {name}; to resume: {command}\n")
    assert "stopping: running cells save after this step; once more to stop at once" in output
    assert not list((project.directory / "plan" / "failed").glob("*"))
    cells = project.directory / "plan" / "cells"
    saved = [path for path in cells.glob("*/checkpoints/last.ckpt") if path.read_bytes().startswith(b"step")]
    assert len(saved) == 2
    for checkpoint in saved[:damaged]:
        checkpoint.write_bytes(b"torn")
    code, output = project.run(*shlex.split(command)[1:])
    assert code == 0, output
    assert output.count("exit code 1; it is run again") == damaged
    assert sum("resumed" in path.read_text() for path in cells.glob("*/log.txt")) == 2 - damaged
    assert len(outcomes(project)) == 4
    assert outcomes(project).items() <= outcomes(finished).items()


def outcomes(project):
    """The published outcome of each cell by its place, as ids depend on the duration in the configuration."""
    results = [json.loads(content) for content in project.results().values()]
    keys = ("stage", "arm", "beta_index", "replicate")
    return {tuple(r["cell"][key] for key in keys): [r["final"], r["curves"]] for r in results}


def test_a_sweep_in_slices_of_time_ends_with_the_same_results(project, finished, capsys):
    plan = project.write()
    code, output = project.run("sweep", "--config", plan, "--minutes", "1e-9")
    assert code == 1
    command = f"lit-klrb sweep --config {plan} --minutes 1e-9"
    assert output.endswith(f"stopped after 1e-09 minutes; to resume: {command}\n")
    assert not (project.directory / "plan" / "results").exists()
    assert project.run("sweep", "--config", plan, "--minutes", "10")[0] == 0
    assert outcomes(project) == outcomes(finished)
    for wrong in ("0", "-1", "nan", "inf", "x"):
        assert main(["sweep", "--config", str(plan), "--minutes", wrong]) == 2
        assert "a number of minutes > 0 is expected" in capsys.readouterr().err


def test_a_second_signal_stops_a_sweep_at_once(project):
    plan = project.write(rloo={"waits": True, "deaf": True})
    code, output = interrupt(project, plan, os.kill, signal.SIGTERM, signal.SIGINT)
    assert code == 130
    assert output.endswith("once more to stop at once, without saving\n")


def test_plan_prints_cells_time_and_power(project, capsys):
    assert main(["plan", "--config", str(project.write()), "--workers", "2"]) == 0
    output = capsys.readouterr().out
    assert "10 cells, 10 to run" in output
    assert "rloo\t8\t60 s (assumed: no time is known)\n" in output
    assert "about 6 min 00 s with 2 at a time" in output
    assert "4 matched pairs" in output
    assert "4 pairs CANNOT reach p ≤ 0.05 (best possible: 0.12); needs 3 replicates" in output
    assert [path.name for path in (project.directory / "plan").iterdir()] == ["plan.json"]
    assert "seed" not in output
    assert "\nMonteCarlo\t" in output
    assert main(["plan", "--config", str(project.write()), "--cells"]) == 0
    assert capsys.readouterr().out.count("\ttodo\t") == 10


def test_plan_uses_finished_cells_and_their_times(swept, capsys):
    for seconds in (swept.directory / "plan" / "cells").glob("*/seconds"):
        seconds.write_text("90.0")
    assert main(["plan", "--config", str(swept.write(grid={"replicates": 4})), "--workers", "4"]) == 0
    output = capsys.readouterr().out
    assert "18 cells, 8 to run" in output
    assert "rloo\t8\t90 s\nabout 3 min 00 s with 4 at a time" in output
    assert "swap test of 8 pairs, level 0.05\npower, no pilot" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep"], "the following arguments are required: --config; see lit-klrb sweep --help"),
        (["sweep", "--config", "none.yaml"], "none.yaml does not exist; the path of a configuration"),
        (["sweep", "--config", "x", "--workers", "0"], "argument --workers: '0' is not allowed; an integer"),
        (["swep"], "'swep'"),
    ],
)
def test_wrong_usage_ends_with_2_and_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_terminal_shows_a_bar_and_a_pipe_lines(cells):
    results = {"state": "done", "final": {"reward": 1.25, "kl": None}}
    shown = {}
    for terminal in (True, False):
        out = StringIO()
        with Progress("demo", Console(file=out, force_terminal=terminal, width=120)) as progress:
            progress.counted(2, 10)
            progress.settled(cells[2], results, 95.0)
            progress.failed(cells[3], "exit code 1\nlast words", given_up=True)
        shown[terminal] = out.getvalue()
    assert shown[False] == (
        "[3/10] rloo MonteCarlo beta=0.1 #0: done, reward 1.25; 1 min 35 s left\n"
        "rloo RaoBlackwell beta=0.1 #0: exit code 1; given up\n    last words\n"
    )
    assert "3/10" in shown[True]
    assert "━" in shown[True]
    assert "last words" in shown[True]
    out, longest = StringIO(), replace(cells[2], stage="RaoBlackwell" * 4)
    with Progress("demo", Console(file=out, force_terminal=True, width=100)) as progress:
        progress.counted(2, 10)
        progress.settled(longest, results, 95.0)
    assert "3/10" in out.getvalue()
    assert "…" not in out.getvalue()


def test_shared_stages_are_linked_under_their_names(finished):
    directory = finished.directory / "plan"
    for stage in ("sft", "dpo"):
        assert (directory / stage).is_symlink()
        assert (directory / stage / "summary.json").exists()
        assert (directory / stage).resolve().parent == (directory / "cells").resolve()
    assert not (directory / "rloo").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            ["environment.code: a -> b", "plan.grid.replicates: 6 -> 8", "configs.rloo.kl.beta: 1 -> 2"],
            "what the ids of cells depend on has changed: environment.code, configs.rloo.kl.beta",
        ),
        (["plan.grid.replicates: 6 -> 4"], "the grid differs"),
    ],
)
def test_the_plan_says_why_results_are_not_used(tmp_path, changes, why):
    store = Store(tmp_path)
    assert _unused([], store, changes) is None
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "abc.json").touch()
    assert _unused([], store, changes) == f"  1 of 1 results in {tmp_path} are of other cells: {why}"
