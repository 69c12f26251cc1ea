"""Manipulated and damaged files of a sweep, and the problems that the page reports."""

import json
import os

import pytest
from synthetic import cell, edit_plan, publish, result, write_sweep

from analysis.cli import main
from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.numbers import summary_numbers
from analysis.report.sections.summary import summary
from analysis.results import DamagedFileError
from analysis.results.load import load_sweep

DESIGN = {"replicates": 5, "lift": {"RaoBlackwell": 0.6}}


@pytest.fixture
def runs(tmp_path):
    """A sweep that says "better" as long as nobody touches it."""
    write_sweep(tmp_path, **DESIGN)
    assert numbers(tmp_path)["comparisons"][0]["outcome"] == "better"
    return tmp_path


def numbers(runs):
    return summary_numbers(load_assessment(runs))


def assert_no_verdict(runs, *problems):
    """The page has no verdict and names each problem."""
    assessment = load_assessment(runs)
    section = summary(assessment)
    assert section.title == "No verdict"
    assert not section.findings
    told = summary_numbers(assessment)
    assert {one["outcome"] for one in told["comparisons"]} <= {"no_verdict"}
    assert {one["decided_by"] for one in told["comparisons"]} <= {None}
    for problem in problems:
        assert any(problem in text for text in told["problems"]), told["problems"]
        assert any(problem in text for text in section.paragraphs)


def grid_results(runs):
    """Place -> content of the published results of the grid."""
    found = {}
    for path in (runs / "results").glob("*.json"):
        content = json.loads(path.read_text())
        where = content["cell"]
        if where["arm"]:
            found[where["arm"], where["beta_index"], where["replicate"]] = content
    return found


def test_an_honest_sweep_has_a_verdict(runs):
    told = numbers(runs)
    assert told["plan"]["recomputed"]
    assert not told["plan"]["changed_after_results"]
    assert told["problems"] == []
    assert told["complete"]
    (one,) = told["comparisons"]
    assert (one["outcome"], one["decided_by"]) == ("better", "swap_test")


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document["content"]["plan"]["primary"].update(alpha=0.2),
        lambda document: document["content"]["plan"]["primary"].update(margins={"objective": 0.6}),
        lambda document: document["cells"][3].update(seed=8),
        lambda document: document.update(history=document["history"] * 2),
        lambda document: document["history"][0].update(published=3),
        lambda document: document.update(extra=1),
    ],
    ids=["alpha", "margins", "cell", "history", "published", "extra"],
)
def test_a_plan_edited_by_hand_gives_no_verdict(runs, edit):
    edit_plan(runs, edit, rehash=False)
    assert_no_verdict(runs, "plan.json: does not have the hash")
    assert numbers(runs)["plan"]["recomputed"] is False


def test_a_history_removed_by_hand_gives_no_verdict(runs):
    def grown(document):
        (first,) = document["history"]
        version = {**first, "previous": document["hash"], "published": 9, "changes": ["x: 1 -> 2"]}
        document["history"].append(version)

    edit_plan(runs, grown)
    assert numbers(runs)["plan"]["changed_after_results"]
    edit_plan(runs, lambda document: document["history"].pop(), rehash=False)
    assert_no_verdict(runs, "plan.json: does not have the hash")


@pytest.mark.parametrize("beta", [0.1, 0.25])
def test_a_result_that_is_not_planned_is_out_and_gives_no_verdict(runs, beta):
    betas = {0: 0.05, 1: 0.1, 2: 0.2, 3: beta}
    extra = result(cell("rloo", ("RaoBlackwell", 3, 0), betas=betas), {"reward": 9.0, "kl": 0.1})
    publish(runs / "results", extra)
    assert_no_verdict(runs, f"results/{extra['id']}.json: its id is not in the plan")
    assert ("RaoBlackwell", 3, 0) not in load_assessment(runs).sweep.grid


@pytest.mark.parametrize(("key", "value"), [("beta", 0.4), ("seed", 5), ("argv", ["fit", "--x"])])
def test_a_result_whose_record_is_not_the_plans_is_out_and_gives_no_verdict(runs, key, value):
    content = grid_results(runs)["RaoBlackwell", 1, 0]
    content["cell"][key] = value
    publish(runs / "results", content)
    assert_no_verdict(runs, f"results/{content['id']}.json: its {key} is {value!r}, the plan has ")
    assert ("RaoBlackwell", 1, 0) not in load_assessment(runs).sweep.grid


def planned_otherwise(key, value):
    """Edit a plan to match a changed record of RaoBlackwell's first run at the second beta."""

    def edit(document):
        keys = ("arm", "beta_index", "replicate")
        (found,) = (one for one in document["cells"] if tuple(one[k] for k in keys) == ("RaoBlackwell", 1, 0))
        found[key] = value

    return edit


def test_a_pair_with_two_seeds_is_out_and_gives_no_verdict_though_the_plan_agrees(runs):
    content = grid_results(runs)["RaoBlackwell", 1, 0]
    content["cell"]["seed"] = 5
    publish(runs / "results", content)
    edit_plan(runs, planned_otherwise("seed", 5))
    assert_no_verdict(runs, "the runs of beta index 1, replicate 0 have different seeds: [5, 1000]")
    grid = load_assessment(runs).sweep.grid
    assert ("RaoBlackwell", 1, 0) not in grid
    assert ("MonteCarlo", 1, 0) not in grid


def test_a_beta_unlike_its_grids_gives_no_verdict_though_the_plan_agrees(runs):
    content = grid_results(runs)["RaoBlackwell", 1, 0]
    content["cell"]["beta"] = 0.01
    publish(runs / "results", content)
    edit_plan(runs, planned_otherwise("beta", 0.01))
    assert_no_verdict(runs, "its beta is 0.01, expected 0.1")


def test_cells_dropped_from_the_plan_give_no_verdict_though_the_hash_was_computed_anew(runs):
    edit_plan(runs, lambda document: document["cells"].pop())
    assert_no_verdict(runs, "plan.json: its cells are not those of its grid", "its id is not in the plan")


def test_without_a_plan_seeds_and_betas_are_checked_all_the_same(tmp_path):
    def edit(point, made):
        if point == ("RaoBlackwell", 1, 0):
            made["cell"]["seed"] = 5
        if point == ("RaoBlackwell", 0, 1):
            made["cell"]["beta"] = 0.07
        if point == ("RaoBlackwell", 2, 2):
            made["cell"]["replicate"] = 10**15
        return made

    write_sweep(tmp_path, edit=edit, plan=False, **DESIGN)
    assert_no_verdict(tmp_path, "different seeds: [5, 1000]", "its beta is 0.07, expected 0.05")
    assert load_assessment(tmp_path).sweep.plan.grid.replicates < 100


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
        "its seed is 5, the plan has 1000",
    }
    assert not sweep.invalid


def grow(runs, **version):
    """Append a version to the plan and recompute its hash."""

    def edit(document):
        before = document["history"][-1]
        grown = {**before, "previous": document["hash"], "published": 9, "changes": ["grown"], **version}
        document["history"].append(grown)

    edit_plan(runs, edit)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_plan_grown_after_results_or_sequential_is_decided_by_the_e_process(tmp_path, sequential):
    runs = write_sweep(tmp_path, primary={"sequential": sequential}, **DESIGN)
    if not sequential:
        assert numbers(runs)["comparisons"][0]["outcome"] == "better"
        grow(runs)
    assessment = load_assessment(runs)
    (one,) = summary_numbers(assessment)["comparisons"]
    assert one["decided_by"] == "e_process"
    evidence = assessment.comparisons[0].decision.evidence
    assert evidence.threshold == 1 / 0.05
    assert (one["outcome"] == "better") == (evidence.crossing is not None)
    (finding,) = summary(assessment).findings
    why = "the plan is sequential" if sequential else "the plan was changed after results were published"
    assert finding.headline.endswith(f"(decided by the e-process of J = reward − β·KL, because {why}).")
    assert finding.sentences[0].startswith("Exploratory: ")


def test_an_effect_too_small_for_the_e_process_is_inconclusive_though_the_swap_test_rejects(tmp_path):
    runs = write_sweep(tmp_path, replicates=5, betas={0: 0.1, 1: 0.2}, lift={"RaoBlackwell": 0.35})
    assert numbers(runs)["comparisons"][0]["outcome"] == "better"
    grow(runs)
    (one,) = numbers(runs)["comparisons"]
    assert (one["outcome"], one["decided_by"]) == ("inconclusive", "e_process")
    assert one["objective"]["p_adjusted"] <= 0.05
    (finding,) = summary(load_assessment(runs)).findings
    assert finding.headline.startswith("Inconclusive on RaoBlackwell against MonteCarlo: E = ")


def test_a_level_raised_or_a_control_changed_after_results_does_not_help(tmp_path):
    runs = write_sweep(
        tmp_path, estimators=("MonteCarlo", "RaoBlackwell", "K3Reward"), primary={"alpha": 0.2}
    )
    assert load_assessment(runs).comparisons[0].decision.evidence is None
    plan = json.loads((runs / "plan.json").read_text())["content"]["plan"]

    def earlier(document, **primary):
        document["history"][0]["plan"] = {**plan, "primary": {**plan["primary"], **primary}}

    grow(runs)
    edit_plan(runs, lambda document: earlier(document, alpha=0.05))
    assert load_assessment(runs).comparisons[0].decision.evidence.threshold == pytest.approx(2 / 0.05)
    edit_plan(runs, lambda document: earlier(document, alpha=0.05, control="K3Reward"))
    assert load_assessment(runs).comparisons[0].decision.evidence.threshold == pytest.approx(3 / 0.05)


def test_pairs_that_a_later_version_added_come_after_those_it_could_see(tmp_path):
    runs = write_sweep(tmp_path, replicates=2)
    plan = json.loads((runs / "plan.json").read_text())["content"]["plan"]

    def edit(document):
        first = document["history"][0]
        small = {**plan, "grid": {**plan["grid"], "beta": {"0": 0.05, "2": 0.2}, "replicates": 1}}
        second = {**first, "previous": document["hash"], "published": 4, "changes": ["grown"]}
        document["history"] = [{**first, "plan": small}, second]

    edit_plan(runs, edit)
    (comparison,) = load_assessment(runs).comparisons
    pairs = comparison.pairs
    order = [(0, 0), (2, 0), (1, 0), (0, 1), (1, 1), (2, 1)]
    rows = [
        int(((pairs.beta_index == index) & (pairs.replicate == replicate)).nonzero()[0][0])
        for index, replicate in order
    ]
    differences = (pairs.reward - pairs.beta[:, None] * pairs.kl) @ [1, -1]
    assert comparison.decision.evidence.differences == pytest.approx(differences[rows])


def test_program_facing_numbers_are_those_of_the_files(tmp_path):
    runs = write_sweep(tmp_path, replicates=3)
    told = numbers(runs)
    found = grid_results(runs)
    (arm,) = (arm for arm in told["arms"] if (arm["label"], arm["beta"]) == ("RaoBlackwell", 0.1))
    finals = [found["RaoBlackwell", 1, replicate]["final"] for replicate in range(3)]
    for key, of in {
        "reward": lambda final: final["reward"],
        "kl": lambda final: final["kl"],
        "objective": lambda final: final["reward"] - 0.1 * final["kl"],
    }.items():
        values = [of(final) for final in finals]
        mean = sum(values) / 3
        assert arm[key]["mean"] == pytest.approx(mean)
        sd = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
        # 4.303: the t quantile at .975 with two degrees of freedom
        assert arm[key]["interval"] == pytest.approx(
            [mean - 4.3027 * sd / 3**0.5, mean + 4.3027 * sd / 3**0.5], rel=1e-4
        )
    assert arm["n"] == 3
    starts = [one["curves"]["val/kl"]["value"][0] for one in found.values()]
    assert told["start"]["kl"] == pytest.approx(sum(starts) / len(starts))
    ratio = told["comparisons"][0]["kl_ratio"]
    logs = 1.0
    for index in range(3):
        for replicate in range(3):
            ours, theirs = (
                found[name, index, replicate]["final"]["kl"] for name in ("RaoBlackwell", "MonteCarlo")
            )
            logs *= ours / theirs
    assert ratio == pytest.approx(logs ** (1 / 9))


def link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def loop(path):
    path.unlink()
    path.symlink_to(path)


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def huge(path):
    with path.open("r+b") as file:
        file.truncate(2**40)


def text(content):
    return lambda path: path.write_text(content)


DAMAGES = {
    "loop": loop,
    "fifo": fifo,
    "folder": folder,
    "huge": huge,
    "empty": text(""),
    "deep": text("[" * 10**5),
    "NaN": text('{"schema": NaN}'),
    "list": text("[]"),
    "number": text("1" * 5000),
    "latin": lambda path: path.write_bytes(b"\xe4"),
    "surrogate": text('{"schema": "\\ud800"}'),
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
    lambda document: document.update(history="ab"),
    lambda document: document.update(cells={"a": 1}),
    lambda document: document["cells"][0].update(id=[3]),
    lambda document: document["content"]["plan"].update(more=1),
    lambda document: document["content"]["plan"].update(stages=[1]),
    lambda document: document["history"].insert(0, {**document["history"][0], "plan": 3}),
    set_grid(replicates=10**12),
    set_grid(replicates=True),
    set_grid(estimator="MonteCarlo"),
    set_grid(beta={"x": 0.1}),
    set_primary(alpha="x"),
    set_primary(margins=[1]),
    set_primary(kl_cuts=[10**400]),
    set_primary(corner="ab"),
]


@pytest.mark.parametrize("edit", MALFORMED)
def test_a_plan_of_the_wrong_shape_is_one_line(tmp_path, edit):
    write_sweep(tmp_path, replicates=1, betas={0: 0.1})
    edit_plan(tmp_path, edit, rehash=False)
    with pytest.raises(DamagedFileError, match="not a locked plan") as caught:
        load_sweep(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_result_is_named_and_nothing_is_concluded(tmp_path, damage):
    write_sweep(tmp_path, replicates=1)
    name = grid_results(tmp_path)["RaoBlackwell", 0, 0]["id"]
    damage(tmp_path / "results" / f"{name}.json")
    told = numbers(tmp_path)
    (problem,) = told["problems"]
    assert problem.startswith(f"results/{name}.json: ")
    assert "\n" not in problem
    assert not told["complete"]
    assert told["comparisons"][0]["outcome"] == "no_verdict"


def test_a_link_to_a_result_is_read(tmp_path):
    write_sweep(tmp_path, replicates=1)
    name = grid_results(tmp_path)["RaoBlackwell", 0, 0]["id"]
    link(tmp_path / "results" / f"{name}.json")
    assert numbers(tmp_path)["problems"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"final": []},
        {"final": {"reward": "x", "kl": 1.0}},
        {"final": {"reward": True, "kl": [1]}},
        {"final": {"reward": 1.0, "kl": "1e999"}},
        {"curves": {"train/kl": {"step": [0, 0], "value": [1, 2]}}},
        {"curves": {"train/kl": {"step": [0, 1], "value": [1]}}},
        {"curves": {"train/kl": {"step": [0, 1], "value": [[1], [2]]}}},
        {"curves": {"train/kl": [1, 2]}},
        {"curves": 3},
        {"cell": {"stage": "rloo", "arm": ["x"]}},
        {"versions": [1]},
        {"studies": 3},
        {"studies": {"estimation": {}}},
        {"studies": {"gradient_noise": []}},
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
def test_a_page_is_written_to_a_file_of_its_own_or_not_at_all(tmp_path, capsys, name, place):
    write_sweep(tmp_path, replicates=1)
    (tmp_path / "victim").write_text("precious")
    place(tmp_path / name)
    assert main(["report", str(tmp_path)]) == 2
    assert "is a link or not a file" in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, undrawn, monkeypatch):
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
