"""The locked plan and its history."""

import json

import pytest
import yaml

from analysis.design import expand, read_plan
from analysis.sweep import DamagedFileError, Store, lock
from analysis.sweep.changes import changes


@pytest.fixture
def locked(project):
    """Lock a plan in one directory: (changes, content of plan.json)."""
    store = Store(project.directory / "runs")

    def locked(**keys):
        plan = read_plan(project.write(**keys))
        altered = lock(plan, expand(plan), store)
        return altered, json.loads((store.directory / "plan.json").read_text())

    return locked


def test_the_plan_is_locked_with_its_cells(locked, cells):
    altered, document = locked()
    assert altered == []
    assert [cell["id"] for cell in document["cells"]] == [cell.id for cell in cells]
    assert document["history"] == [{"hash": document["hash"], "published": 0, "changes": []}]
    assert document["content"]["plan"]["grid"]["beta"] == {"0": 0.1, "1": 0.2}


def test_an_unchanged_plan_stays_byte_for_byte(locked, project):
    locked()
    before = (project.directory / "runs" / "plan.json").read_bytes()
    # Where it is kept and how its YAML is written do not matter.
    assert locked(directory="elsewhere")[0] == []
    assert (project.directory / "runs" / "plan.json").read_bytes() == before


def test_a_change_is_told_and_kept_with_what_could_have_been_seen(locked, project):
    first = locked()[1]
    (project.directory / "runs" / "results").mkdir()
    (project.directory / "runs" / "results" / "a.json").touch()
    told = [
        "configs.rloo.seconds: 0 -> 1",
        "plan.grid.replicates: 2 -> 3",
        "plan.primary.alpha: 0.05 -> 0.01",
    ]
    keys = {
        "rloo": {"seconds": 1},
        "primary": {"control": "MonteCarlo", "alpha": 0.01},
        "grid": {"replicates": 3},
    }
    altered, second = locked(**keys)
    assert altered == told
    assert second["hash"] != first["hash"]
    assert second["history"] == [*first["history"], {"hash": second["hash"], "published": 1, "changes": told}]
    # Going back is a change like any other.
    third = locked()[1]
    assert third["hash"] == first["hash"]
    assert len(third["history"]) == 3


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace('"alpha": 0.05', '"alpha": 0.5'),
        lambda text: text.replace('"hash": "', '"hash": "0'),
        lambda text: "{}",
        lambda text: text[:-3],
    ],
)
def test_a_locked_plan_edited_by_hand_is_refused(locked, project, edit):
    locked()
    path = project.directory / "runs" / "plan.json"
    path.write_text(edit(path.read_text()))
    with pytest.raises(DamagedFileError, match=r"plan\.json: does not match its hash"):
        locked()


def test_changes_names_every_leaf_that_differs():
    old = yaml.safe_load("{a: {b: 1, c: [1, 2]}, d: {e: 1}, f: null}")
    new = yaml.safe_load("{a: {b: 1, c: [1, 3]}, d: 2, f: null, g: 0}")
    assert [*changes(old, new)] == ["a.c: [1, 2] -> [1, 3]", "d: {'e': 1} -> 2", "g: nothing -> 0"]
    assert not [*changes(old, old)]
