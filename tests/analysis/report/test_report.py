import json
import math
import re
from html.parser import HTMLParser
from importlib import import_module

import numpy as np
import pytest
from synthetic import cell, diverge, edit_plan, fail, publish, result, write_sweep

from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.sections import attainment, evidence, execution, outcomes, summary
from analysis.report.sections.tradeoff import landmarks
from analysis.report.verify import verify
from analysis.results.load import load_sweep
from analysis.stats.attainment import hypervolume
from analysis.stats.bias import reference_bias

# The package's attributes of these names are the functions.
certificates = import_module("analysis.report.sections.certificates")
estimation = import_module("analysis.report.sections.kl_values")

FIVE = (
    "MonteCarlo",
    "RaoBlackwell",
    "RaoBlackwellControlVariate",
    "ReleasedMonteCarlo",
    "ReleasedRaoBlackwell",
)


class Page(HTMLParser):
    """Tags, ids, images and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.ids, self.images, self.regions, self.words = [], [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.images += [attributes] if tag == "img" else []
        self.regions += [attributes["aria-label"]] if attributes.get("role") == "region" else []

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())


def page_of(runs, **design) -> Page:
    return Page(build(write_sweep(runs, **design)).read_text("utf-8"))


def said(runs) -> str:
    """The findings, text and tables of a report, without the drawings, which take seconds."""
    study = load_assessment(runs)
    sections = [summary(study), execution(study)]
    words = [word for s in sections for f in s.findings for word in (f.headline, *f.sentences)]
    words += [word for s in sections for word in s.paragraphs]
    tables = [table for s in sections for table in s.tables]
    words += [cell for table in tables for row in table.rows for cell in row]
    return " ".join(" ".join(words).replace("\u00a0", " ").split())


@pytest.fixture(scope="module")
def better(tmp_path_factory):
    runs = tmp_path_factory.mktemp("better")
    build(write_sweep(runs, lift={"RaoBlackwell": 0.3}, replicates=5))
    return runs


def test_the_page_stands_alone(better):
    html = (better / "report.html").read_text("utf-8")
    page = Page(html)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", html)
    assert not re.search(r"url\(|@import", re.search("<style>.*</style>", html, re.S)[0])
    assert len(html.encode()) < 1_000_000
    assert len(page.ids) == len(set(page.ids))
    assert len(page.regions) == len(set(page.regions)) > 5


def test_every_figure_has_a_text_and_its_numbers(better):
    page = Page((better / "report.html").read_text("utf-8"))
    assert len(page.images) == 6
    for image in page.images:
        assert len(image["alt"]) > 40
        assert image["src"].startswith("data:image/svg+xml,%3Csvg")
    assert page.text.count("The numbers of this figure") == 6


def test_the_verdict_comes_with_its_evidence_and_conditions(better):
    text = Page((better / "report.html").read_text("utf-8")).text
    assert "RaoBlackwell is better than MonteCarlo: it has higher J = reward − β·KL." in text
    assert re.search(
        r"higher J = reward − β·KL than MonteCarlo \(difference \+[\d.]+ reward units, 95% CI", text
    )
    assert "conditional on" in text
    assert "2 arms × 3 values of β × 5 replicates = 30 runs" in text
    assert "significant" not in text
    for share in re.findall(r"\d+%", text):
        assert re.search(rf"(\d+/\d+ \({share}|95% CI|\b(80|95)%|to {share}|CI {share})", text), share


SMALL = {"replicates": 2, "betas": {0: 0.1}}


def test_the_same_input_gives_the_same_bytes_anywhere(tmp_path):
    runs = write_sweep(tmp_path / "runs", **SMALL)
    first = build(runs).read_bytes()
    elsewhere = build(runs, tmp_path / "deep" / "page.html")
    assert elsewhere.read_bytes() == first
    assert verify(elsewhere).differences == []


def test_a_partial_sweep_has_a_banner_and_no_verdict(tmp_path, undrawn):
    page = page_of(tmp_path, replicates=2, edit=lambda point, made: None if point[1:] == (1, 1) else made)
    assert "No verdict: partial sweep" in page.text
    assert "2 of 12 planned runs have no result yet" in page.text
    assert "decides: Holm" not in page.text
    assert "p (swap)" not in page.text


def test_a_tampered_result_withholds_the_verdict(tmp_path):
    runs = write_sweep(tmp_path, replicates=2)
    path = sorted(path for path in (runs / "results").glob("*.json") if "RaoBlackwell" in path.read_text())[0]
    path.write_text(path.read_text().replace("0.03", "0.01"))
    text = said(runs)
    assert "There is no verdict: 1 of 12" in text
    assert path.name in text


def test_a_failed_run_drops_its_pair_and_keeps_the_verdict(tmp_path):
    lost = ("RaoBlackwell", 0, 1)
    write_sweep(tmp_path, replicates=3, edit=lambda point, made: None if point == lost else made)
    fail(tmp_path, lost)
    text = said(tmp_path)
    assert "no verdict" not in text
    assert "1 run lost to the machinery" in text
    assert "3 attempts: OSError: disk full" in text


def test_a_diverged_run_is_listed_and_ranks_are_named(tmp_path):
    text = said(write_sweep(tmp_path, replicates=4, edit=diverge(("MonteCarlo", 2, 0))))
    assert "MonteCarlo, β = 0.2, replicate 0 diverged" in text
    assert "compared by rank" in text


def test_all_diverged_still_ends_in_a_clear_verdict(tmp_path, undrawn):
    page = page_of(tmp_path, replicates=2, edit=diverge())
    assert "This design cannot tell RaoBlackwell from MonteCarlo" in page.text


@pytest.mark.parametrize(
    ("design", "expected"),
    [
        ({"replicates": 1, "betas": {0: 0.1}}, "This design cannot tell RaoBlackwell from MonteCarlo"),
        ({"replicates": 1}, "This design cannot tell"),
        ({"estimators": ("RaoBlackwell",)}, "no two runs form a matched pair"),
        ({"plan": False, "replicates": 2}, "There is no locked plan"),
    ],
    ids=["one pair", "one replicate", "one estimator", "no plan"],
)
def test_poor_input_gives_a_clear_page(tmp_path, design, expected):
    assert expected in said(write_sweep(tmp_path, **design))


def test_identical_runs_are_a_tie(tmp_path):
    def same(point, made):
        made["final"] |= {"reward": 1.0, "kl": 2.0}
        return made

    text = said(write_sweep(tmp_path, replicates=3, edit=same))
    assert "cannot tell" in text
    assert "9/18 (50%" in text


def test_more_than_two_estimators_meet_the_planned_control(tmp_path, undrawn):
    page = page_of(tmp_path, estimators=FIVE, primary={"control": "RaoBlackwell"}, **SMALL)
    assert "4 estimators against RaoBlackwell" in page.text
    others = [name for name in FIVE if name != "RaoBlackwell"]
    assert f"Not distinguishable from RaoBlackwell by this design: {', '.join(others)}." in page.text


def test_units_are_never_mixed_in_one_figure(tmp_path):
    runs = write_sweep(tmp_path, estimators=FIVE[:3], edit=diverge(("RaoBlackwell", 0, 0)), **SMALL)
    section = outcomes(load_assessment(runs))
    assert len(section.figures) == 2
    units = [{row[1].partition(" (")[2] for row in figure.table.rows} for figure in section.figures]
    assert units == [{"rank among the runs of its beta (0 to 1))"}, {"reward units)"}]


def later_version(**version):
    """An edit of a plan: a version locked after the first, with the same content."""

    def edit(document):
        (first,) = document["history"]
        document["history"].append({**first, "previous": document["hash"], **version})

    return edit


def test_the_plan_sets_alpha_and_cuts_and_its_changes_are_shown(tmp_path):
    runs = write_sweep(tmp_path, primary={"alpha": 0.2, "kl_cuts": [2.5]}, **SMALL)
    edit_plan(runs, later_version(published=7, changes=["plan.primary.alpha: 0.05 -> 0.2"]))
    assert "up to 7 results could have been seen: plan.primary.alpha: 0.05 -> 0.2" in said(runs)
    (table,) = outcomes(load_assessment(runs)).details
    assert "two-sided at 0.2" in table.caption
    assert any(row[0].startswith("frontier_share below KL = 2.5") for row in table.rows)


def test_runs_without_curves_have_no_curve_section(tmp_path, undrawn):
    def bare(point, made):
        made["curves"] = {}
        return made

    assert "curves" not in page_of(tmp_path, edit=bare, **SMALL).ids


def test_text_from_files_is_escaped(tmp_path, undrawn):
    lost = ("RaoBlackwell", 0, 0)
    write_sweep(tmp_path, edit=lambda point, made: None if point == lost else made, **SMALL)
    fail(tmp_path, lost, error="<script>alert(1)</script>")
    html = build(tmp_path).read_text("utf-8")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_landmarks_are_named(tmp_path):
    runs = write_sweep(tmp_path, **SMALL)
    assert landmarks(load_sweep(runs)) == [("reference", 0.0, 0.1), ("after DPO", 0.4, 0.5)]
    assert "after DPO" in build(runs).read_text("utf-8").replace("%20", " ")
    publish(runs / "results", result(cell("warm", seed=1), {"reward": None, "kl": None}))
    assert len(landmarks(load_sweep(runs))) == 2


def test_the_setting_is_said_beside_the_verdict(tmp_path):
    assert "The setting" not in said(write_sweep(tmp_path / "one", **SMALL))
    text = said(write_sweep(tmp_path / "other", setting="a toy.", **SMALL))
    assert "The setting: a toy. What is said here is said of it and no other." in text


def test_studies_have_sections_of_their_own(better, tmp_path, undrawn):
    without = Page((better / "report.html").read_text("utf-8"))
    assert not {"estimation", "gradient_noise"} & set(without.ids)
    runs = write_sweep(tmp_path, studied=True, **SMALL)
    page = Page(build(runs).read_text("utf-8"))
    assert {"estimation", "gradient_noise"} <= set(page.ids)
    assert "10 completions of each of 6 prompts" in page.text
    assert "inconclusive: fewer than 64 batches" in page.text
    assert len(landmarks(load_sweep(runs))) == 2, "a study is no warm start"
    assert verify(runs).differences == []
    numbers = json.loads((runs / "results.json").read_text())["sections"]["estimation"]["20"]
    assert numbers["rb"]["log_variance_ratio"] == pytest.approx(-2 * math.log(4))


def test_a_heavy_tail_is_named_beside_the_bias():
    draws = np.random.default_rng(0).lognormal(sigma=[[0.1], [6.0]], size=(2, 1000))
    light, heavy = (estimation._bias(reference_bias(values, np.ones(1000)))[-1] for values in draws)
    assert heavy.startswith("inconclusive (heavy tail, index ")
    assert "tail" not in light


def test_every_test_is_certified_on_the_readers_own_design(better, tmp_path, monkeypatch, undrawn):
    numbers = certificates.certificates(load_assessment(better)).numbers["RaoBlackwell"]
    assert abs(numbers["0.0"] - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 1000)
    assert numbers["0.0"] < numbers["0.5"] < numbers["1.0"]
    assert "Type-I error here" in Page((better / "report.html").read_text("utf-8")).text
    assert "certificates" not in page_of(tmp_path, replicates=1).ids


def test_what_runs_attain_together_and_how_far_they_spread_is_said(tmp_path, undrawn):
    steady = write_sweep(tmp_path, lift={"RaoBlackwell": 0.6}, replicates=6)
    page = Page(build(steady).read_text("utf-8"))
    numbers = json.loads((steady / "results.json").read_text())["sections"]
    found = numbers["attainment"]["RaoBlackwell"]
    assert found["outcome"] == "better"
    pairs = load_assessment(steady).comparisons[0].pairs
    corner = float(pairs.kl.max()), float(pairs.reward.min())
    volumes = [
        [
            hypervolume(pairs.kl[rows, column], pairs.reward[rows, column], corner)
            for rows in [pairs.replicate == replicate]
            for column in (0, 1)
        ]
        for replicate in range(6)
    ]
    expected = np.mean([ours - theirs for ours, theirs in volumes])
    assert found["hypervolume_difference"] == pytest.approx(expected)
    assert "more hypervolume" in page.text
    assert "The corner was not fixed in advance" in page.text
    assert set(numbers["stability"]) == {"RaoBlackwell, reward", "RaoBlackwell, kl"}
    assert numbers["stability"]["RaoBlackwell, reward"]["outcome"] in ("inconclusive", "better", "worse")
    assert "exact McNemar test" in page.text


def test_a_steadier_estimator_is_called_steadier(tmp_path, undrawn):
    def steadier(point, made):
        if point[0] == "RaoBlackwell":
            values = made["curves"]["train/reward"]["value"]
            made["curves"]["train/reward"]["value"] = [0.5 + (v - 0.5) / 50 for v in values]
        return made

    runs = write_sweep(tmp_path, replicates=10, edit=steadier)
    build(runs)
    found = json.loads((runs / "results.json").read_text())["sections"]["stability"]
    assert found["RaoBlackwell, reward"]["outcome"] == "better"
    assert found["RaoBlackwell, reward"]["log_ratio"] < -2
    assert found["RaoBlackwell, kl"]["outcome"] != "better"


def test_evidence_pair_by_pair_is_there_when_planned_and_while_the_sweep_runs(tmp_path):
    late = {"edit": lambda point, made: None if point[2] == 5 else made}
    design = {"lift": {"RaoBlackwell": 0.5}, "replicates": 6, **late}
    planned = {"control": "MonteCarlo", "alpha": 0.05, "sequential": True}
    study = load_assessment(write_sweep(tmp_path / "a", primary=planned, **design))
    section = evidence(study)
    numbers = section.numbers["RaoBlackwell"]
    assert len(numbers["e"]) == 15
    assert numbers["e"][numbers["crossing"] - 1] >= numbers["threshold"] == 20
    assert any(
        "RaoBlackwell has a higher J than MonteCarlo: E reached 20" in text for text in section.paragraphs
    )
    assert "valid at any look" in said(tmp_path / "a")
    assert evidence(load_assessment(write_sweep(tmp_path / "b", **design))) is None
    assert "must not decide when the sweep stops" in said(tmp_path / "b")


def test_a_planned_corner_is_the_one_hypervolume_is_measured_from(tmp_path):
    primary = {"control": "MonteCarlo", "alpha": 0.05, "corner": [90.0, -2.0]}
    study = load_assessment(write_sweep(tmp_path, primary=primary))
    section = attainment(study)
    assert "KL 90.0, reward" in " ".join(section.paragraphs)
    assert "not fixed in advance" not in " ".join(section.paragraphs)
    pairs = study.comparisons[0].pairs
    volumes = [
        [
            hypervolume(pairs.kl[rows, column], pairs.reward[rows, column], (90.0, -2.0))
            for rows in [pairs.replicate == replicate]
            for column in (0, 1)
        ]
        for replicate in range(4)
    ]
    expected = np.mean([ours - theirs for ours, theirs in volumes])
    assert section.numbers["RaoBlackwell"]["hypervolume_difference"] == pytest.approx(expected)
