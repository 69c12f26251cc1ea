"""The order of cells and the handling of their exits; exit codes follow a script."""

import os
from collections import defaultdict

import pytest
from rich.console import Console

from analysis.design import read_plan
from analysis.sweep import Clock, Coordinator, Progress, State, Store, coordinator
from analysis.sweep.job import BUSY, MISPLACED
from analysis.sweep.launchers import Exit
from lit_klrb.errors import OUTAGE


class ScriptedLauncher:
    """Ends a job at every second look, with the exit codes of each cell's script in turn, or 0."""

    def __init__(self, store, slots=2):
        self.store, self.slots = store, slots
        self.remote, self.gpus = False, 0
        self.script = defaultdict(list)
        self.submitted, self.waiting, self.stopped, self.looks = [], [], False, 0
        self.most, self.saves, self.taken_away = 0, 0, 143

    def submit(self, job):
        if self.script[job.cell.id][:1] == ["refuse"]:
            self.script[job.cell.id].pop(0)
            raise ConnectionError("no server")
        self.submitted.append(job.cell)
        self.waiting.append(job.cell)
        self.most = max(self.most, len(self.waiting))

    def wait(self, seconds):
        self.looks += 1
        if not self.waiting or self.looks % 2:
            return []
        cell = self.waiting.pop(0)
        code = self.script[cell.id].pop(0) if self.script[cell.id] else 0
        if code == 0:
            publish(self.store, cell)
        if code == "preempted":
            self.saves += 1
            checkpoint = self.store.workdir(cell.id) / "checkpoints" / "last.ckpt"
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_text(f"step {self.saves}")
            os.utime(checkpoint, ns=(self.saves, self.saves))
            code = self.taken_away
        return [Exit(cell.id, code)]

    def stop(self):
        self.stopped = True


def publish(store, cell):
    checkpoint = store.workdir(cell.id) / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_bytes(b"weights")
    (store.workdir(cell.id) / "summary.json").write_text("{}")
    result = {"schema": 1, "id": cell.id, "cell": cell.record(), "state": "done", "final": {}, "curves": {}}
    store.publish(result)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


@pytest.fixture
def launcher(store):
    return ScriptedLauncher(store)


@pytest.fixture
def run(project, cells, store, launcher):
    def run(console=None, **settings):
        plan = read_plan(project.directory / "plan.yaml")
        progress = Progress("plan", console or Console(quiet=True))
        return Coordinator(plan, cells, store, launcher, progress, **settings).run()

    return run


def test_shared_cells_come_first_and_matched_pairs_together(run, cells, launcher):
    outcome = run()
    assert launcher.submitted == cells
    assert [(cell.stage, cell.point and cell.point[:2]) for cell in cells[:4]] == [
        ("sft", None),
        ("dpo", None),
        ("rloo", ("MonteCarlo", 0.1)),
        ("rloo", ("RaoBlackwell", 0.1)),
    ]
    assert outcome.complete
    assert outcome.ran == 10
    assert launcher.most == 2
    assert launcher.stopped


def test_published_cells_are_not_run_again(run, cells, store, launcher):
    for cell in cells[:7]:
        publish(store, cell)
    assert run().ran == 3
    assert launcher.submitted == cells[7:]


def test_a_cell_another_sweep_finishes_meanwhile_is_not_run(run, cells, store, launcher):
    real = launcher.wait

    def wait(seconds):
        publish(store, cells[5])
        return real(seconds)

    launcher.wait = wait
    assert run().complete
    assert cells[5] not in launcher.submitted


def test_a_cell_taken_by_another_sweep_costs_no_attempt(run, cells, launcher):
    launcher.script[cells[3].id] = [BUSY] * 5
    outcome = run()
    assert outcome.complete
    assert launcher.submitted.count(cells[3]) == 6


@pytest.mark.parametrize(
    ("codes", "runs", "state"),
    [
        ([1, -9], 3, State.DONE),
        ([1, 1, 1], 3, State.FAILED),
        ([-9, 255, 75, 1], 4, State.FAILED),
    ],
)
def test_attempts_are_limited(run, cells, store, launcher, codes, runs, state):
    launcher.script[cells[4].id] = codes
    outcome = run()
    assert outcome.states[cells[4].id] is state
    assert launcher.submitted.count(cells[4]) == runs
    assert outcome.complete == (state is State.DONE)
    assert (store.failure(cells[4].id) is None) == (state is State.DONE)
    assert [*outcome.states.values()].count(State.DONE) == 10 - (state is State.FAILED)


@pytest.mark.parametrize("place", [0, 2])  # of the first all others need the result
@pytest.mark.parametrize("code", [OUTAGE, 143, "refuse"])
def test_an_outage_is_waited_for_and_blocks_nothing(run, cells, launcher, monkeypatch, code, place):
    monkeypatch.setattr(coordinator, "PATIENCE", (0.01,) * 5)
    launcher.script[cells[place].id] = [code] * 5
    assert run().complete


@pytest.mark.parametrize("code", [OUTAGE, 143, -9])
def test_a_cell_that_gets_further_each_time_is_never_given_up_and_not_waited_for(
    run, cells, store, launcher, monkeypatch, code
):
    monkeypatch.setattr(coordinator, "PATIENCE", (1000.0,))
    launcher.taken_away, launcher.script[cells[2].id] = code, ["preempted"] * 20
    assert run().complete
    assert launcher.submitted.count(cells[2]) == 21


def test_a_cell_that_fails_by_itself_is_given_up_however_far_it_got(run, cells, launcher):
    launcher.taken_away, launcher.script[cells[2].id] = 1, ["preempted"] * 20
    assert run().states[cells[2].id] is State.FAILED
    assert launcher.submitted.count(cells[2]) == 3


@pytest.mark.parametrize(("code", "submitted"), [(OUTAGE, 3), ("refuse", 0)])
def test_patience_ends(run, cells, launcher, monkeypatch, code, submitted):
    monkeypatch.setattr(coordinator, "PATIENCE", (0.01,) * 2)
    launcher.script[cells[2].id] = [code] * 9
    outcome = run()
    assert launcher.submitted.count(cells[2]) == submitted
    assert [*outcome.states.values()].count(State.DONE) == 9
    assert outcome.states[cells[2].id] is State.FAILED


def test_a_machine_that_cannot_run_cells_costs_one_attempt_less(run, cells, store, launcher, capsys):
    real = launcher.wait
    launcher.script[cells[3].id], launcher.script[cells[4].id] = [MISPLACED] * 3, [MISPLACED] * 4
    launcher.wait = lambda seconds: [
        exit._replace(reason="node7 does not have it" if exit.code == MISPLACED else "")
        for exit in real(seconds)
    ]
    states = run(Console()).states
    assert states[cells[3].id] is State.DONE
    assert states[cells[4].id] is State.FAILED
    assert store.failure(cells[4].id)["error"] == "node7 does not have it"
    assert capsys.readouterr().out.count("node7 does not have it; its cells run elsewhere") == 1


def test_a_usage_error_stops_its_arm_after_one_cell_and_no_other(run, cells, store, launcher):
    mine, others = ([c for c in cells[2:] if c.point.arm == name] for name in ("MonteCarlo", "RaoBlackwell"))
    launcher.script[mine[0].id] = [2]
    outcome = run()
    assert outcome.states[mine[0].id] is State.FAILED
    assert {outcome.states[cell.id] for cell in mine[1:]} == {State.BLOCKED}
    assert [cell for cell in launcher.submitted if cell in mine] == mine[:1]
    assert outcome.reasons[mine[3].id] == f"it would fail like {mine[0]}, with exit code 2"
    assert {outcome.states[cell.id] for cell in others} == {State.DONE}
    assert not outcome.complete
    assert [store.failure(cell.id) is None for cell in mine] == [False, True, True, True]


def test_a_usage_error_of_a_later_cell_stops_no_other(run, cells, launcher):
    launcher.script[cells[4].id] = [2]
    outcome = run()
    assert outcome.states[cells[4].id] is State.FAILED
    assert launcher.submitted.count(cells[4]) == 1
    assert [*outcome.states.values()].count(State.DONE) == 9


def test_a_usage_error_of_a_shared_stage_blocks_its_dependents(run, cells, launcher):
    launcher.script[cells[1].id] = [2]
    outcome = run()
    assert launcher.submitted == cells[:2]
    assert outcome.reasons[cells[5].id] == "a cell it starts from has no checkpoint"


def test_a_job_that_died_after_publishing_has_succeeded(run, cells, store, launcher):
    real = launcher.wait
    launcher.wait = lambda seconds: [exit._replace(code=-9) for exit in real(seconds)]
    assert run().complete
    assert launcher.submitted == cells


def test_workers_are_stopped_when_the_coordinator_is_interrupted(run, launcher):
    def interrupted(seconds):
        raise KeyboardInterrupt

    launcher.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        run()
    assert launcher.stopped


def test_the_time_left_follows_finished_cells(cells, store):
    clock = Clock(cells, store)
    assert clock.left([], 2) == 0
    assert clock.left(cells, 2) is None
    # One after the other, then 8 cells two by two.
    assert clock.left(cells, 2, assumed=10.0) == 10 + 10 + 40
    for cell, seconds in zip(cells, (5.0, 7.0, 1.0, 3.0), strict=False):
        store.workdir(cell.id).mkdir(parents=True)
        store.seconds(cell.id).write_text(str(seconds))
        clock.add(cell)
    # A resumed cell has no time, and a damaged one counts for nothing
    clock.add(cells[4])
    store.workdir(cells[5].id).mkdir()
    store.seconds(cells[5].id).write_text("-1")
    clock.add(cells[5])
    assert clock.mean("rloo") == 2.0
    assert clock.left(cells, 2) == 5 + 7 + 8
    assert clock.left(cells[-1:], 8) == 2.0


def test_a_sweep_keeps_within_the_limit_and_what_cells_start_from(run, cells, store, launcher, capsys):
    outcome = run(Console(soft_wrap=True), storage=1e-12)
    assert outcome.complete
    output = capsys.readouterr().out
    assert "removed checkpoints, metrics and studies of 8 finished cells, 5.6e-08 GB" in output
    assert "had more than 1e-12 GB; --storage sets another limit\n" in output
    kept = {path.parents[1].name for path in store.directory.glob("cells/*/checkpoints/last.ckpt")}
    assert kept == {cell.id for cell in cells if cell.point is None}
    launcher.submitted.clear()
    assert run().complete
    assert launcher.submitted == []
