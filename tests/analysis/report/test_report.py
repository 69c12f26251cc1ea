"""The page of a sweep."""

import csv
import re

import pytest
from reading import FIVE, SMALL, Page, numbers, page_of, text_of
from synthetic import diverge, fail, write_sweep

from analysis.cli.main import main
from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.elements import Table
from analysis.report.figures import sheet
from analysis.report.sections.summary import summary
from analysis.report.verify import verify
from analysis.stats.intervals import Interval


def test_the_page_is_self_contained(better):
    html = (better / "report.html").read_text("utf-8")
    page = Page(html)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", html)
    assert not re.search(r"url\(|@import", re.search("<style>.*</style>", html, re.S)[0])
    assert len(html.encode()) < 1_000_000
    assert len(page.ids) == len(set(page.ids))
    assert len(page.regions) == len(set(page.regions)) > 5


def test_a_column_has_the_decimals_that_its_largest_number_needs():
    ends = Interval(-0.5, 12.0, 0.95), None, Interval(0.0, 0.25, 0.95)
    rows = list(zip("abc", (0.012345, -0.5, float("nan")), ends, strict=True))
    table = Table("", ("Arm", "Difference", "Interval"), rows)
    assert table.cells == [("a", "0.012", "−0.50 to 12.00"), ("b", "−0.500", "–"), ("c", "–", "0.00 to 0.25")]
    assert table.numeric == {1, 2}


def test_every_figure_has_alternative_text_and_its_numbers(better):
    page = Page((better / "report.html").read_text("utf-8"))
    assert len(page.images) == 4
    for image in page.images:
        assert len(image["alt"]) > 40
        assert image["src"].startswith("data:image/svg+xml,%3Csvg")
    assert page.text.count("The numbers of this figure") == 4


def test_the_verdict_has_its_evidence_and_conditions(better):
    text = Page((better / "report.html").read_text("utf-8")).text
    assert "RaoBlackwell better +" in text
    assert re.search(
        r"higher J = reward − β·KL than MonteCarlo \(difference \+[\d.]+ reward units, 95% CI", text
    )
    assert "conditional on" in text
    assert "30 runs (2 arms × 3 β × 5 replicates); none diverged." in text
    assert "significant" not in text
    assert "The intervals of this answer are 95 %, over seeds, for the prompts that were evaluated." in text
    assert "MonteCarlo gained over the start: " in text


def test_the_same_input_gives_the_same_bytes_anywhere(tmp_path):
    runs = write_sweep(tmp_path / "runs", **SMALL)
    first = build(runs).read_bytes()
    elsewhere = build(runs, tmp_path / "deep" / "page.html")
    assert elsewhere.read_bytes() == first
    assert verify(elsewhere).differences == []


def test_the_verdicts_as_csv_and_latex_are_those_of_the_numbers(tmp_path, undrawn, capsys):
    runs = write_sweep(tmp_path / "runs", lift={"RaoBlackwell": 0.3}, replicates=5)
    for name in ("verdicts.csv", "verdicts.tex"):
        assert main(["report", str(runs), "--table", str(tmp_path / name)]) == 0
    (row,) = csv.DictReader((tmp_path / "verdicts.csv").read_text().splitlines())
    (one,) = numbers(runs)["comparisons"]
    assert (row["arm"], row["control"], row["verdict"]) == ("RaoBlackwell", "MonteCarlo", "better")
    for name, value in {
        "difference": one["objective"]["estimate"],
        "low": one["objective"]["interval"][0],
        "p_adjusted": one["objective"]["p_adjusted"],
        "gain_high": one["gain"]["interval"][1],
    }.items():
        assert float(row[name]) == pytest.approx(value), name
    text = (tmp_path / "verdicts.tex").read_text()
    low = f"{one['objective']['interval'][0]:.3g}"
    assert r"Arm & Verdict & Difference & 95\,\% interval & $p$ \\" in text
    assert re.search(rf"RaoBlackwell & better & [\d.]+ & {low}\d* to [\d.]+ & [\d.]+ \\\\", text)
    assert main(["report", str(runs), "--table", "verdicts.xls"]) == 2
    assert "--table verdicts.xls: a name that ends in .csv or .tex is expected" in capsys.readouterr().err


def test_the_command_prints_the_answer_above_the_path(tmp_path, undrawn, capsys):
    whole, partial = tmp_path / "whole", tmp_path / "partial"
    write_sweep(whole, lift={"RaoBlackwell": 0.3}, replicates=5)
    write_sweep(partial, replicates=1, edit=lambda point, made: None if point[1] == 1 else made)
    for runs, answer in (
        (whole, r"RaoBlackwell: J 0\.\d+ higher than MonteCarlo \(95 % .*\); MonteCarlo gained .* start"),
        (partial, "RaoBlackwell against MonteCarlo: no verdict, partial sweep"),
    ):
        assert main(["report", str(runs)]) == 0
        first, path = capsys.readouterr().out.splitlines()
        assert re.fullmatch(answer, first)
        assert path == str(runs / "report.html")


def test_a_partial_sweep_has_a_banner_and_no_verdict(tmp_path, undrawn):
    page = page_of(tmp_path, replicates=2, edit=lambda point, made: None if point[1:] == (1, 1) else made)
    assert "No verdict: partial sweep" in page.text
    assert "2 of 12 planned runs have no result yet" in page.text
    assert "What MonteCarlo gained" not in page.text


def test_a_failed_run_drops_its_pair_and_keeps_the_verdict(tmp_path):
    lost = ("RaoBlackwell", 0, 1)
    write_sweep(tmp_path, replicates=3, edit=lambda point, made: None if point == lost else made)
    fail(tmp_path, lost)
    text = text_of(tmp_path)
    assert "no verdict" not in text
    assert "3 attempts: OSError: disk full" in text
    assert "Caution: runs without a result: MonteCarlo 0, RaoBlackwell 1; their pairs are left out" in text


def test_a_diverged_run_is_listed_and_ranks_are_named(tmp_path):
    text = text_of(write_sweep(tmp_path, replicates=4, edit=diverge(("MonteCarlo", 2, 0))))
    assert "MonteCarlo, β = 0.2, replicate 0 diverged" in text
    assert "compared by rank" in text


def test_a_small_p_is_shown_with_its_digits(tmp_path):
    runs = write_sweep(tmp_path, replicates=6, lift={"RaoBlackwell": 0.9})
    (table,) = summary(load_assessment(runs)).tables
    assert table.cells[0][table.header.index("p (swaps)")] == "0.00020"


@pytest.mark.parametrize(("lift", "without"), [(0.3, "better"), (-0.3, "worse")])
@pytest.mark.parametrize("arm", ["MonteCarlo", "RaoBlackwell"])
def test_lost_runs_of_either_arm_are_taken_as_those_least_in_favour_of_the_verdict(
    tmp_path, arm, lift, without
):
    lost = [(arm, index, replicate) for index in range(3) for replicate in range(3)]
    design = {"replicates": 6, "lift": {"RaoBlackwell": lift}}
    write_sweep(tmp_path, edit=lambda point, made: None if point in lost else made, **design)
    for place in lost:
        fail(tmp_path, place)
    assessment = load_assessment(tmp_path)
    assert assessment.comparisons[0].primary.outcome.value == without
    assert assessment.worst.endswith("RaoBlackwell against MonteCarlo inconclusive.")


def test_one_arm_alone_is_compared_with_nothing(tmp_path):
    text = text_of(write_sweep(tmp_path, estimators=("RaoBlackwell",)))
    assert "no two runs form a matched pair" in text


def test_identical_runs_are_a_tie(tmp_path):
    def same(point, made):
        made["final"] |= {"reward": 1.0, "kl": 2.0}
        return made

    text = text_of(write_sweep(tmp_path, replicates=3, edit=same))
    assert "There is no verdict" in text


def test_more_than_two_estimators_are_compared_with_the_planned_control(tmp_path, undrawn):
    page = page_of(tmp_path, estimators=FIVE, primary={"control": "RaoBlackwell"}, **SMALL)
    assert page.text.startswith("It is open whether any of 4 arms has a higher J than RaoBlackwell")
    others = [name for name in FIVE if name != "RaoBlackwell"]
    found = dict(re.findall(r"(\w+) (?:inconclusive|better|worse) ([+−][0-9.]+)", page.text))
    told = {one["treatment"]: one["objective"]["estimate"] for one in numbers(tmp_path)["comparisons"]}
    assert set(found) == set(others) == set(told)
    assert all(float(found[name].replace("−", "-")) == pytest.approx(told[name], rel=0.01) for name in told)


def test_the_setting_is_stated_beside_the_verdict(tmp_path):
    assert "The setting" not in text_of(write_sweep(tmp_path / "one", **SMALL))
    text = text_of(write_sweep(tmp_path / "other", setting="a toy.", **SMALL))
    assert "The setting: a toy. All statements apply to this setting only." in text


def test_drawings_have_short_coordinates_and_whole_labels():
    with sheet(2.0) as drawn:
        axes = drawn.canvas.subplots()
        axes.plot([0.0, 1 / 3, 1.0], [0.0, 0.00123456, 0.002])
        axes.set_yticks([0.00125])
    paths = re.findall(r' d="([^"]+)"', drawn.svg)
    assert paths
    assert not any(re.search(r"\.\d{3}", path) for path in paths)
    assert ">0.00125<" in drawn.svg
    assert "rotate(-0" not in drawn.svg
