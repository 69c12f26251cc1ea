"""Manipulated plans and results of a sweep, and the problems that the page reports."""

import json

import pytest
from reading import grid_results, numbers, text_of
from synthetic import cell, edit_plan, publish, result, write_sweep

from analysis.report.assessment import load_assessment
from analysis.report.build import build, summary_numbers
from analysis.report.sections.summary import summary

DESIGN = {"replicates": 5, "lift": {"RaoBlackwell": 0.6}}


@pytest.fixture
def runs(tmp_path):
    """A sweep whose verdict is "better" unless it is changed."""
    write_sweep(tmp_path, **DESIGN)
    assert numbers(tmp_path)["comparisons"][0]["outcome"] == "better"
    return tmp_path


def assert_no_verdict(runs, *problems):
    """The page has no verdict and names each problem."""
    assessment = load_assessment(runs)
    section = summary(assessment)
    assert section.title == "No verdict"
    assert not section.tables
    reported = summary_numbers(assessment)
    assert {one["outcome"] for one in reported["comparisons"]} <= {"no_verdict"}
    assert {one["decided_by"] for one in reported["comparisons"]} <= {None}
    for problem in problems:
        assert any(problem in text for text in reported["problems"]), reported["problems"]
        assert any(problem in text for text in section.paragraphs)


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document["content"]["plan"]["primary"].update(alpha=0.2),
        lambda document: document["cells"][3].update(seed=8),
        lambda document: document.update(history=document["history"] * 2),
    ],
    ids=["alpha", "cell", "history"],
)
def test_a_plan_edited_by_hand_gives_no_verdict(runs, edit):
    edit_plan(runs, edit, rehash=False)
    assert_no_verdict(runs, "plan.json: does not have the hash")
    assert numbers(runs)["plan"]["recomputed"] is False


@pytest.mark.parametrize("beta", [0.1, 0.25])
def test_a_result_that_is_not_planned_is_left_out_and_gives_no_verdict(runs, beta):
    betas = {0: 0.05, 1: 0.1, 2: 0.2, 3: beta}
    extra = result(cell("rloo", ("RaoBlackwell", 3, 0), betas=betas), {"reward": 9.0, "kl": 0.1})
    publish(runs / "results", extra)
    assert_no_verdict(runs, f"results/{extra['id']}.json: its id is not in the plan")
    assert ("RaoBlackwell", 3, 0) not in load_assessment(runs).sweep.grid


@pytest.mark.parametrize(("key", "value"), [("beta", 0.4), ("seed", 5), ("argv", ["fit", "--x"])])
def test_a_result_that_contradicts_the_plan_is_left_out_and_gives_no_verdict(runs, key, value):
    content = grid_results(runs)["RaoBlackwell", 1, 0]
    content["cell"][key] = value
    publish(runs / "results", content)
    assert_no_verdict(runs, f"results/{content['id']}.json: its {key} is {value!r}, the plan has ")
    assert ("RaoBlackwell", 1, 0) not in load_assessment(runs).sweep.grid


def test_cells_removed_from_the_plan_give_no_verdict_even_with_a_new_hash(runs):
    edit_plan(runs, lambda document: document["cells"].pop())
    assert_no_verdict(runs, "plan.json: its cells are not those of its grid", "its id is not in the plan")


def test_the_page_says_when_the_plan_was_locked_and_at_which_commit(runs):
    assert "at a time that was not recorded" in text_of(runs)
    moment = {"time": "2026-01-02T03:04:05+00:00", "commit": "ab" * 20}

    def record(document):
        document["locked"] = {document["hash"]: moment}

    edit_plan(runs, record, rehash=False)
    assert f"2026-01-02 03:04:05+00:00 at commit {'ab' * 20}" in text_of(runs)
    plan = numbers(runs)["plan"]
    assert (plan["locked"], plan["recomputed"]) == ([moment], True)


def test_a_forged_failure_does_not_drop_a_pair(runs):
    content = grid_results(runs)["RaoBlackwell", 1, 0]
    where = {**content["cell"], "seed": 5}
    (runs / "failed").mkdir()
    for name, record in {content["id"]: where, "f" * 64: content["cell"]}.items():
        forged = {"id": name, "cell": record, "attempts": 1, "error": "x"}
        (runs / "failed" / f"{name}.json").write_text(json.dumps(forged))
    sweep = load_assessment(runs).sweep
    assert sweep.failures == ()
    assert {problem.text.partition(": ")[2] for problem in sweep.problems} == {
        "its id is not in the plan",
        f"its seed is 5, the plan has {content['cell']['seed']}",
    }
    assert not sweep.invalid


def test_a_report_of_the_largest_numbers_has_no_overflow(tmp_path, undrawn):
    def edit(point, made):
        made["final"]["reward"] *= 1e38
        return made

    build(write_sweep(tmp_path, edit=edit, replicates=3, betas={0: 0.1, 1: 0.3}))
