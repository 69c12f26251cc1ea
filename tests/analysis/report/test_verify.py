"""`verify` detects forged pages, figures and numbers, and lists what it could not compare."""

import hashlib
import json

import pytest
from synthetic import edit_plan, publish, write_sweep

from analysis.cli import main
from analysis.report.build import build

SMALL = {"replicates": 2, "betas": {0: 0.1}}


@pytest.fixture
def page(tmp_path, undrawn):
    return build(write_sweep(tmp_path, **SMALL))


@pytest.fixture
def verified(capsys):
    """Run `verify`: (exit code, lines printed)."""

    def verified(path):
        code = main(["verify", str(path)])
        out, err = capsys.readouterr()
        return code, (out or err).splitlines()

    return verified


def edit_numbers(folder, edit):
    path = folder / "results.json"
    numbers = json.loads(path.read_text("utf-8"))
    edit(numbers)
    path.write_text(json.dumps(numbers), "utf-8")


def test_verify_lists_what_it_compared(page, verified):
    document = json.loads((page.parent / "plan.json").read_text())
    assert verified(page) == (
        0,
        [
            f"data: {page.parent}, 6 results",
            f"plan: {document['hash']}, recomputed",
            "every number agrees with the results",
        ],
    )


def test_a_changed_digit_of_the_numbers_is_named(page, verified):
    edit_numbers(page.parent, lambda numbers: numbers["arms"][0].update(n=6))
    code, lines = verified(page)
    assert code == 1
    assert "differs: results.json: arms[0].n: 6 is written, the results give 2" in lines


def test_a_forged_word_is_found_even_with_a_new_hash_of_the_page(page, verified):
    page.write_text(page.read_text("utf-8").replace("= 4 runs", "= 5 runs"), "utf-8")
    code, lines = verified(page)
    assert code == 1
    assert "differs: report.html: is not the page that results.json was written with" in lines
    sha256 = hashlib.sha256(page.read_bytes()).hexdigest()
    edit_numbers(page.parent, lambda numbers: numbers["page"].update(sha256=sha256))
    code, lines = verified(page)
    assert code == 1
    (line,) = (line for line in lines if line.startswith("differs"))
    assert line.startswith("differs: report.html: line ")


@pytest.mark.parametrize("forge", [b"%3Csvg%20", b"\r\n"])
def test_a_forged_figure_is_found_whatever_version_drew_it(page, verified, forge):
    old = b"%3Csvg" if forge.startswith(b"%") else b"\n"
    page.write_bytes(page.read_bytes().replace(old, forge, 1))
    assert verified(page)[0] == 1
    # Under another version of the library drawings are not compared, but it is not the page that was written.
    edit_numbers(page.parent, lambda numbers: numbers["engines"].update(matplotlib="0.1"))
    code, lines = verified(page)
    assert code == 1
    assert "differs: report.html: is not the page that results.json was written with" in lines


def test_drawings_of_other_versions_are_listed_as_not_compared(page, verified):
    edit_numbers(page.parent, lambda numbers: numbers["engines"].update(matplotlib="0.1"))
    code, lines = verified(page)
    assert code == 3
    assert any("its drawings, which were made under matplotlib 0.1 (here " in line for line in lines)
    assert lines[-1] == "everything that was compared agrees with the results"


def test_a_report_of_other_code_is_compared_in_what_does_not_depend_on_code(page, verified):
    edit_numbers(page.parent, lambda numbers: numbers["code"].update(sources="0" * 64))
    edit_numbers(page.parent, lambda numbers: numbers["arms"][0].update(n=6))
    code, lines = verified(page)
    assert code == 3
    assert any("written by version 0.1.0 (000000000000), this is version 0.1.0" in line for line in lines)
    for edit in (
        lambda numbers: next(iter(numbers["sections"]["tradeoff"]["runs"].values())).update(reward=9.0),
        lambda numbers: numbers["sections"]["provenance"]["results"].popitem(),
        lambda numbers: numbers["plan"].update(hash="0"),
    ):
        before = (page.parent / "results.json").read_text()
        edit_numbers(page.parent, edit)
        assert verified(page)[0] == 1
        (page.parent / "results.json").write_text(before)


def test_a_changed_result_is_named(page, verified):
    runs = page.parent
    path = next(
        path for path in sorted((runs / "results").glob("*.json")) if "RaoBlackwell" in path.read_text()
    )
    text = path.read_text("utf-8")
    path.write_text(text.replace("0.03", "0.01"), "utf-8")
    code, lines = verified(runs)
    assert code == 1
    assert any(line.startswith("problem: ") and path.name in line for line in lines)
    # Changed together with its checksum it is not a damaged file, but gives other numbers.
    content = json.loads(text)
    content["final"]["reward"] += 0.5
    publish(runs / "results", content)
    code, lines = verified(runs)
    assert code == 1
    assert any(content["id"] in line for line in lines)


@pytest.mark.parametrize("reward", [1e90, None])
def test_a_page_that_agrees_about_a_damaged_result_is_no_success(page, verified, reward):
    path = next(iter(sorted((page.parent / "results").glob("*.json"))))
    content = json.loads(path.read_bytes())
    if reward is None:
        path.write_text("{")
    else:
        content["final"]["reward"] = reward
        path.unlink()
        publish(path.parent, content)
    build(page.parent)
    code, lines = verified(page)
    assert code == 3
    assert f"not compared: results/{path.name}: it cannot be read" in lines


def test_a_plan_without_its_hash_is_a_difference_even_if_the_page_reports_it(page, verified):
    edit_plan(page.parent, lambda document: document["content"]["plan"].update(name="other"), rehash=False)
    build(page.parent)
    code, lines = verified(page)
    assert code == 1
    assert any("does NOT recompute" in line for line in lines)
    assert any(line.startswith("differs: plan.json: does not have the hash") for line in lines)


def test_a_page_that_agrees_with_files_of_another_plan_is_no_success(page, verified):
    path = next(iter((page.parent / "results").glob("*.json")))
    content = json.loads(path.read_bytes())
    publish(page.parent / "results", {**content, "id": "0" * 64})
    build(page.parent)
    code, lines = verified(page)
    assert code == 1
    assert f"differs: results/{'0' * 64}.json: its id is not in the plan" in lines


def test_a_design_without_a_plan_cannot_be_compared_with_one(tmp_path, undrawn, verified):
    code, lines = verified(build(write_sweep(tmp_path, plan=False, **SMALL)))
    assert code == 3
    assert "not compared: plan.json: there is none; the design was inferred from the results" in lines


def test_the_page_may_have_any_name_and_directory(tmp_path, undrawn, verified):
    runs = write_sweep(tmp_path / "runs", **SMALL)
    elsewhere = build(runs, tmp_path / "deep" / "page.html")
    assert verified(elsewhere.parent)[0] == 0


def damage(path, content):
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"[1", "cannot be read"),
        (b"[]", "not the numbers of a report"),
        (b'{"schema": 9}', "not the numbers of a report"),
        (b'{"schema": 2}', "does not name the directory of its sweep"),
        (b'{"schema": 2, "runs": NaN}', "NaN is not JSON"),
        (b'{"schema": 2, "runs": "."}' + b"[" * 100_000, "cannot be read"),
        (b'{"schema": 2, "runs": ".", "page":' + b"[" * 100_000, "nested too deeply"),
        (b'{"schema": 2, "runs": ".", "page": "\\ud800"}', "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_damaged_numbers_are_one_line(page, verified, content, message):
    damage(page.parent / "results.json", content)
    code, (line,) = verified(page)
    assert code == 2
    assert line.startswith("error: ")
    assert message in line


def test_numbers_of_the_wrong_types_differ(page, verified):
    for wrong in ([], 3, "x", {"sha256": 1}, {"name": 5}, None):
        edit_numbers(
            page.parent,
            lambda numbers, wrong=wrong: numbers.update(
                dict.fromkeys(("page", "code", "engines", "plan", "sections"), wrong)
            ),
        )
        assert verified(page)[0] == 1


def test_a_missing_report_is_a_usage_error(tmp_path, verified):
    for path in (tmp_path, tmp_path / "none.html", tmp_path / "none"):
        code, (line,) = verified(path)
        assert code == 2
        assert "a report with results.json beside it is expected" in line
