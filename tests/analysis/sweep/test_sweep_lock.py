"""The locked plan and its history."""

import json
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from analysis.design import expand, read_plan
from analysis.results import DamagedFileError
from analysis.results.locked import LockedPlan, hash_of
from analysis.sweep import lock
from lit_klrb.errors import ConfigurationError


@pytest.fixture
def runs(project):
    return project.directory / "runs"


@pytest.fixture
def locked(project, runs):
    """Lock a plan in one directory: (changes, content of plan.json)."""

    def locked(*, record=True, **keys):
        plan = read_plan(project.write(**keys))
        altered, _ = lock(plan, expand(plan), runs, record=record)
        return altered, json.loads((runs / "plan.json").read_text())

    return locked


def begin(runs, results=0):
    """Create the files of cells that have started, some with a result."""
    (runs / "cells" / "a").mkdir(parents=True)
    (runs / "results").mkdir()
    for index in range(results):
        (runs / "results" / f"{index}.json").touch()


def test_the_plan_is_locked_with_its_cells(locked, cells, runs):
    altered, document = locked()
    assert altered == []
    assert [cell["id"] for cell in document["cells"]] == [cell.id for cell in cells]
    assert document["content"]["plan"]["grid"]["beta"] == {"0": 0.1, "1": 0.2}
    (version,) = document["history"]
    assert version == {"previous": None, "published": 0, "changes": [], "plan": document["content"]["plan"]}
    assert document["hash"] == hash_of(document)
    read = LockedPlan.read(runs / "plan.json")
    assert read.recomputed
    assert not read.changed_after_results
    assert [*read.cells.values()] == cells
    assert [*read.plan.stages] == ["sft", "dpo", "rloo"]


def test_a_sweep_that_begins_while_the_arms_are_examined_keeps_its_plan(project, runs):
    """Two sweeps may be started on one directory: the slower one finds the results of the other."""
    plan = read_plan(project.write())
    expansion = expand(plan)

    def other():
        lock(plan, expansion, runs, record=True)
        begin(runs, results=2)

    altered, _ = lock(plan, expansion, runs, record=True, meanwhile=other)
    assert altered == []
    locked = LockedPlan.read(runs / "plan.json")
    assert [version["published"] for version in locked.document["history"]] == [0]
    assert not locked.changed_after_results


def test_another_order_of_blocks_is_a_change_as_it_moves_their_replicates(locked, runs):
    blocks = {name: {"overrides": {"lr": rate}} for name, rate in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    locked(grid={"replicates": 3, "blocks": blocks})
    begin(runs, results=1)
    altered, document = locked(grid={"replicates": 3, "blocks": {name: blocks[name] for name in "bac"}})
    assert altered == ["plan.grid.blocks: in the order a, b, c -> b, a, c"]
    assert document["history"][-1]["changes"] == altered
    assert LockedPlan.read(runs / "plan.json").changed_after_results


def test_an_unchanged_plan_stays_byte_for_byte(locked, runs):
    locked()
    begin(runs, results=1)
    before = (runs / "plan.json").read_bytes()
    # The directory and the formatting of the YAML do not matter.
    assert locked(directory="elsewhere")[0] == []
    assert (runs / "plan.json").read_bytes() == before


def test_changes_before_the_first_cell_are_not_recorded(locked, runs):
    first = locked()[1]
    altered, second = locked(grid={"replicates": 3})
    assert altered == []
    assert second["hash"] != first["hash"]
    assert len(second["history"]) == 1
    (runs / "plan.json").write_text("scribbled")
    assert locked()[1]["hash"] == first["hash"]


def test_a_change_is_recorded_with_the_number_of_published_results(locked, runs):
    first = locked()[1]
    begin(runs, results=1)
    told = [
        "plan.grid.replicates: 2 -> 3",
        "plan.primary.alpha: 0.05 -> 0.01",
        "configs.rloo.seconds: 0 -> 1",
    ]
    keys = {"rloo": {"seconds": 1}, "primary": {"control": "MonteCarlo", "alpha": 0.01}}
    keys |= {"grid": {"replicates": 3}}
    altered, unchanged = locked(record=False, **keys)
    assert (altered, unchanged) == (told, first)
    altered, second = locked(**keys)
    assert altered == told
    version = {"previous": first["hash"], "published": 1, "changes": told, "plan": second["content"]["plan"]}
    assert second["history"] == [*first["history"], version]
    # Undoing a change is a change too.
    third = locked()[1]
    assert third["content"] == first["content"]
    assert len({document["hash"] for document in (first, second, third)}) == 3
    read = LockedPlan.read(runs / "plan.json")
    assert read.recomputed
    assert read.changed_after_results
    assert [version.plan.primary.alpha for version in read.history] == [0.05, 0.01, 0.05]


def test_a_plan_says_when_and_at_which_commit_each_version_was_locked(locked, runs, tmp_path, monkeypatch):
    """Neither is part of the plan: the hash is that of a folder outside of git."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    outside = locked()[1]
    (runs / "plan.json").unlink()
    file = tmp_path / "tracked"
    file.write_text("one")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "tracked"), ("commit", "-qm", "one")):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    first, file_before = locked()[1], (runs / "plan.json").read_bytes()
    assert first["hash"] == outside["hash"]
    file.write_text("two")
    locked()
    assert (runs / "plan.json").read_bytes() == file_before  # the time is that of the first lock
    begin(runs, results=1)
    locked(grid={"replicates": 3})
    first_moment, last_moment = LockedPlan.read(runs / "plan.json").moments
    commit = head.stdout.strip()
    assert [first_moment.commit, last_moment.commit] == [commit, f"{commit}-dirty"]
    (unknown,) = outside["locked"].values()
    assert unknown["commit"] is None
    times = [datetime.fromisoformat(one) for one in (unknown["time"], first_moment.time, last_moment.time)]
    assert times == sorted(times)
    assert datetime.now(UTC) - times[0] < timedelta(minutes=10)


def test_a_change_before_any_result_was_published_changed_nothing_after_results(locked, runs):
    locked()
    begin(runs)
    assert locked(grid={"replicates": 3})[0] == ["plan.grid.replicates: 2 -> 3"]
    assert not LockedPlan.read(runs / "plan.json").changed_after_results


def test_a_plan_locked_after_results_is_marked(locked, runs):
    locked()
    begin(runs, results=2)
    (runs / "plan.json").unlink()
    assert locked()[1]["history"][0]["published"] == 2
    assert LockedPlan.read(runs / "plan.json").changed_after_results


EDITS = [
    lambda text: text.replace('"alpha": 0.05', '"alpha": 0.5'),
    lambda text: text.replace('"hash": "', '"hash": "0'),
    lambda text: text.replace('"published": 1', '"published": 0'),
    lambda text: text.replace('"replicate": 0', '"replicate": 1', 1),
]


@pytest.mark.parametrize("edit", [*EDITS, lambda text: "{}", lambda text: text[:-3]])
def test_a_locked_plan_edited_by_hand_is_refused(locked, runs, edit):
    locked()
    begin(runs, results=1)
    locked(grid={"replicates": 3})
    path = runs / "plan.json"
    edited = edit(path.read_text())
    assert edited != path.read_text()
    path.write_text(edited)
    with pytest.raises(
        DamagedFileError, match=r"plan\.json: (does not match its hash|not a locked|cannot be)"
    ):
        locked()


def test_a_history_that_lost_a_version_does_not_recompute(locked, runs):
    locked()
    begin(runs, results=1)
    document = locked(grid={"replicates": 3})[1]
    for history in (document["history"][1:], document["history"][:1], [document["history"][1]] * 2):
        (runs / "plan.json").write_text(json.dumps({**document, "history": history}))
        assert not LockedPlan.read(runs / "plan.json").recomputed


def test_a_published_sweep_is_not_continued(locked, runs):
    locked()
    (runs / "results.jsonl").touch()
    with pytest.raises(ConfigurationError, match=r"published sweep.* name another directory"):
        locked()
