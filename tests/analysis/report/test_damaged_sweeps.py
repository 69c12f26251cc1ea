"""Damaged plans and results are named in one line each; a page never overwrites another file."""

import os

import pytest
from reading import grid_results, numbers
from synthetic import edit_plan, publish, write_sweep

from analysis.checks import load_sweep
from analysis.cli import main
from analysis.report.build import build
from analysis.results import DamagedFileError


def link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def loop(path):
    path.unlink()
    path.symlink_to(path)


def folder(path):
    path.unlink()
    path.mkdir()


def text(content):
    return lambda path: path.write_text(content)


DAMAGES = {
    "loop": loop,
    "folder": folder,
    "empty": text(""),
    "list": text("[]"),
    "number": text("1" * 5000),
    "latin": lambda path: path.write_bytes(b"\xe4"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_plan_is_one_line(tmp_path, capsys, damage):
    write_sweep(tmp_path, replicates=1)
    damage(tmp_path / "plan.json")
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "plan.json" in err
    assert err.count("\n") == 1


def set_primary(**values):
    return lambda document: document["content"]["plan"]["primary"].update(values)


def set_grid(**values):
    return lambda document: document["content"]["plan"]["grid"].update(values)


MALFORMED = [
    lambda document: document.update(schema={}),
    lambda document: document.update(history=[]),
    lambda document: document.update(cells={"a": 1}),
    lambda document: document["content"]["plan"].update(more=1),
    lambda document: document["history"].insert(0, {**document["history"][0], "plan": 3}),
    set_grid(beta={"x": 0.1}),
    set_grid(beta={"0": 1e308}),
    set_primary(alpha="x"),
]


@pytest.mark.parametrize("edit", MALFORMED)
def test_a_plan_of_the_wrong_shape_is_one_line(tmp_path, edit):
    write_sweep(tmp_path, replicates=1, betas={0: 0.1})
    edit_plan(tmp_path, edit, rehash=False)
    with pytest.raises(DamagedFileError, match="not a locked plan") as caught:
        load_sweep(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["loop", "empty", "latin"])
def test_a_damaged_result_is_named_and_gives_no_verdict(tmp_path, damage):
    write_sweep(tmp_path, replicates=1)
    name = grid_results(tmp_path)["RaoBlackwell", 0, 0]["id"]
    DAMAGES[damage](tmp_path / "results" / f"{name}.json")
    reported = numbers(tmp_path)
    (problem,) = reported["problems"]
    assert problem.startswith(f"results/{name}.json: ")
    assert "\n" not in problem
    assert not reported["complete"]
    assert reported["comparisons"][0]["outcome"] == "no_verdict"


def test_a_link_to_a_result_is_read(tmp_path):
    write_sweep(tmp_path, replicates=1)
    name = grid_results(tmp_path)["RaoBlackwell", 0, 0]["id"]
    link(tmp_path / "results" / f"{name}.json")
    assert numbers(tmp_path)["problems"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"final": {"reward": "x", "kl": 1.0}},
        {"curves": {"train/kl": {"step": [0, 0], "value": [1, 2]}}},
        {"cell": {"stage": "rloo", "arm": ["x"]}},
        {"studies": {"estimation": {}}},
        {"state": ["done"]},
    ],
    ids=str,
)
def test_a_result_of_the_wrong_shape_is_named(tmp_path, change):
    write_sweep(tmp_path, replicates=1)
    content = grid_results(tmp_path)["RaoBlackwell", 0, 0]
    publish(tmp_path / "results", {**content, **change})
    (problem,) = load_sweep(tmp_path).problems
    assert problem.text.startswith(f"results/{content['id']}.json: ")


@pytest.mark.parametrize("name", ["report.html", "results.json"])
@pytest.mark.parametrize("place", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("victim")])
def test_a_page_is_never_written_through_a_link_or_to_a_pipe(tmp_path, capsys, name, place):
    write_sweep(tmp_path, replicates=1)
    (tmp_path / "victim").write_text("precious")
    place(tmp_path / name)
    assert main(["report", str(tmp_path)]) == 2
    assert "is a link or not a file" in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "precious"


def test_if_a_page_cannot_be_written_the_previous_one_remains(tmp_path, undrawn, monkeypatch):
    page = build(write_sweep(tmp_path, replicates=1, betas={0: 0.1}))
    before = page.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["report", str(tmp_path)]) == 1
    assert page.read_bytes() == before
    assert not [*tmp_path.glob("*.tmp"), *tmp_path.glob(".*.tmp")]


def test_an_output_below_a_file_is_refused(tmp_path, capsys):
    write_sweep(tmp_path, replicates=1)
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "plan.json" / "page.html")]) == 2
    assert "is not a directory that can be written" in capsys.readouterr().err
