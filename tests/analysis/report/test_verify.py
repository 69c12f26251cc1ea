"""`verify` detects forged pages, figures and numbers, and lists what it could not compare."""

import json
import re

import pytest
from perturbed import moved_statistics
from synthetic import edit_plan, publish, write_sweep

from analysis.cli import main
from analysis.report.build import build, checksum_of
from lit_klrb import __version__

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
    """Edit `results.json`, with a new checksum."""
    path = folder / "results.json"
    numbers = json.loads(path.read_text("utf-8"))
    edit(numbers)
    numbers["checksum"] = checksum_of(numbers)
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


def test_the_answer_for_programs_has_the_same_lines_and_exit_code(page, capsys):
    assert main(["verify", str(page), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["results"], answer["differences"], answer["not_compared"]) == (6, [], [])
    assert answer["plan"]["recomputed"] is True
    edit_numbers(page.parent, lambda numbers: numbers["arms"][0].update(n=6))
    assert main(["verify", str(page), "--json"]) == 1
    (line,) = json.loads(capsys.readouterr().out)["differences"]
    assert line == "results.json: arms[0].n: 6 is written, the results give 2"


def test_a_changed_digit_of_the_numbers_is_named(page, verified):
    edit_numbers(page.parent, lambda numbers: numbers["arms"][0].update(n=6))
    code, lines = verified(page)
    assert code == 1
    assert "differs: results.json: arms[0].n: 6 is written, the results give 2" in lines


def test_a_page_other_than_the_one_that_was_written_is_found_by_its_hash(page, verified):
    assert verified(page)[0] == 0
    page.write_text(page.read_text("utf-8").replace("4 runs (", "5 runs ("), "utf-8")
    assert verified(page)[:1] == (1,)
    assert "differs: report.html: is not the page that results.json was written with" in verified(page)[1]
    page.unlink()  # as those of published sweeps
    assert verified(page.parent)[0] == 0


def test_no_page_is_made_again(page, verified, monkeypatch):
    monkeypatch.setattr("analysis.report.figures.Canvas.savefig", None)
    monkeypatch.setattr("analysis.report.build.page", None)
    assert verified(page)[0] == 0


def test_any_digit_of_the_numbers_changed_by_hand_is_found(page, verified):
    path = page.parent / "results.json"
    text = path.read_text("utf-8")
    longest = max(re.findall(r"\d\.\d+", text), key=len)  # its last digit is within any tolerance
    path.write_text(text.replace(longest, longest[:-1] + str(9 - int(longest[-1])), 1), "utf-8")
    code, lines = verified(page)
    assert code == 1
    assert "differs: results.json: was changed after it was written: it has another checksum" in lines


def by_other_code(numbers):
    numbers["code"].update(sources="0" * 64)


def test_words_and_fields_of_a_report_of_other_code_are_not_compared_but_listed(page, verified):
    edit_numbers(page.parent, by_other_code)
    assert verified(page)[0] == 0

    def edit(numbers):
        first(numbers).update(unit="points of reward", more=1)
        del first(numbers)["replicates"]

    edit_numbers(page.parent, edit)
    code, lines = verified(page)
    assert code == 3
    (line,) = (line for line in lines if line.startswith("not compared: 3 differences in words or fields: "))
    assert f"written by version {__version__} (000000000000), this is version {__version__}" in line
    place = "not compared: results.json: sections.verdict.verdicts.RaoBlackwell[0]"
    assert f'{place}.unit: "points of reward" is written, the results give "reward units"' in lines
    assert f'{place}.replicates: "nothing" is written, the results give 2' in lines


def first(numbers):
    return numbers["sections"]["verdict"]["verdicts"]["RaoBlackwell"][0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda numbers: numbers["comparisons"][0].update(outcome="better"),
        lambda numbers: first(numbers).update(interval=[0.1, 0.2]),
        lambda numbers: first(numbers).update(p=None),
        lambda numbers: numbers["plan"].update(hash="0"),
    ],
)
def test_an_altered_number_or_verdict_is_a_difference_even_in_a_report_of_other_code(page, verified, edit):
    edit_numbers(page.parent, by_other_code)
    edit_numbers(page.parent, edit)
    code, lines = verified(page)
    assert code == 1
    what, where, *_ = (line for line in lines if line.startswith("differs: "))
    assert re.match(
        "differs: [12] differences? in numbers or verdicts: the report was written by version ", what
    )
    assert what.endswith("and either the code or the report changed")
    assert where.startswith("differs: results.json: ")


@pytest.mark.parametrize(
    ("design", "size"), [({"blocks": 3, "replicates": 6}, 6e-16), ({"replicates": 3}, 1e-12)]
)
def test_other_last_digits_of_all_statistics_change_nothing(
    tmp_path, undrawn, verified, monkeypatch, design, size
):
    page = build(write_sweep(tmp_path, lift={"RaoBlackwell": 0.3}, **design))
    before = json.loads((tmp_path / "results.json").read_text())
    with moved_statistics(size, monkeypatch) as moved:
        assert moved > 50
        code, lines = verified(page)
        assert (code, lines[-1]) == (0, "every number agrees with the results")
    with moved_statistics(1e-12, monkeypatch):
        build(tmp_path)
    after = json.loads((tmp_path / "results.json").read_text())
    assert after["checksum"] != before["checksum"], "numbers were moved"
    assert after["sections"]["verdict"]["decisions"] == before["sections"]["verdict"]["decisions"]


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


def test_a_page_that_agrees_about_a_damaged_result_is_no_success(page, verified):
    path = next(iter(sorted((page.parent / "results").glob("*.json"))))
    path.write_text("{")
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1", "cannot be read"),
        (b'{"schema": 9}', "not the numbers of a report"),
        (b'{"schema": 2}', "does not name the directory of its sweep"),
    ],
)
def test_damaged_numbers_are_one_line(page, verified, content, message):
    (page.parent / "results.json").write_bytes(content)
    code, (line,) = verified(page)
    assert code == 2
    assert line.startswith("error: ")
    assert message in line


def test_a_missing_report_is_a_usage_error(tmp_path, verified):
    for path in (tmp_path, tmp_path / "none.html", tmp_path / "none"):
        code, (line,) = verified(path)
        assert code == 2
        assert "a report with results.json beside it is expected" in line
