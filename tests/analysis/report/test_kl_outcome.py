"""A plan that decides by the KL alone, as for distillation: without reward, frontier and matched KL."""

import json
import re

import numpy as np
import pytest
from synthetic import write_sweep

from analysis.report.build import build
from analysis.report.verify import verify
from analysis.results.sweep import load_sweep


def distilled(scales):
    """An edit for `write_sweep`: no reward, and the KL of each arm scaled."""

    def edit(point, made):
        del made["final"]["reward"], made["final"]["reward_se"]
        made["curves"] = {name: curve for name, curve in made["curves"].items() if "reward" not in name}
        made["final"]["kl"] *= scales.get(point[0], 1.0)
        return made

    return edit


def test_a_plan_that_decides_by_the_kl_needs_no_reward(tmp_path, monkeypatch, undrawn):
    runs = write_sweep(
        tmp_path,
        replicates=4,
        edit=distilled({"RaoBlackwell": 0.3}),
        primary={"outcome": "kl", "margins": {"kl": 0.1}},
    )
    page = build(runs).read_text("utf-8")
    assert "RaoBlackwell is better than MonteCarlo: it has a lower KL." in page
    assert "Not shown: this plan decides by the KL alone" in page
    numbers = json.loads((runs / "results.json").read_text())
    (one,) = numbers["comparisons"]
    assert one["objective"] is None
    assert one["outcome"] == "better"
    assert one["matched_kl"]["refused"] == "the plan decides by the KL alone"
    grid = load_sweep(runs).grid
    means = {
        arm: np.mean([run.final["kl"] for place, run in grid.items() if place[0] == arm])
        for arm in ("RaoBlackwell", "MonteCarlo")
    }
    assert one["kl"]["estimate"] == pytest.approx(means["RaoBlackwell"] - means["MonteCarlo"])
    assert all(arm["reward"] is None and arm["objective"] is None for arm in numbers["arms"])
    assert {verdict["claim"] for verdict in numbers["sections"]["verdict"]["verdicts"]["RaoBlackwell"]} == {
        "kl",
        "matched_kl",
        "spread_kl",
        "spread_kl_at_any_step",
        "roughness_kl",
    }
    assert verify(runs).differences == []
    monkeypatch.setattr("analysis.report.verify.code_version", lambda added: {"version": "another"})
    assert verify(runs).differences == []


def test_completions_that_end_at_once_are_seen_beside_their_low_kl(tmp_path, undrawn):
    def edit(point, made):
        made = distilled({"RaoBlackwell": 0.1})(point, made)
        made["final"]["length"] = 1.0 if point[0] == "RaoBlackwell" else 22.0
        return made

    runs = write_sweep(tmp_path, edit=edit, primary={"outcome": "kl"}, betas={0: 1.0})
    page = build(runs).read_text("utf-8")
    assert "Length (tokens)" in page
    assert "−21.00 (−21.00 to −21.00); higher in 0 of 4" in page
    numbers = json.loads((runs / "results.json").read_text())
    assert {arm["label"]: arm["length"]["mean"] for arm in numbers["arms"]} == {
        "MonteCarlo": 22.0,
        "RaoBlackwell": 1.0,
    }

    def once_unrecorded(point, made):
        if point[2] == 0:
            del made["final"]["length"]
        return made

    page = build(write_sweep(tmp_path / "b", edit=once_unrecorded, betas={0: 1.0})).read_text("utf-8")
    assert "J = reward" in page
    assert "Length (tokens)" not in page


def test_with_several_arms_each_is_compared_by_its_kl_and_nothing_is_said_of_rewards(tmp_path, undrawn):
    scales = {"RaoBlackwell": 0.5, "K3Loss": 2.0}
    runs = write_sweep(
        tmp_path,
        estimators=("MonteCarlo", *scales, "K2Loss"),
        replicates=5,
        edit=distilled(scales),
        primary={"outcome": "kl"},
    )
    page = build(runs).read_text("utf-8")
    headlines = re.findall(r"<h4>(.*?)</h4>", page)
    assert [re.sub(r" \(KL .*?\)", "", headline) for headline in headlines] == [
        "Better than MonteCarlo: RaoBlackwell.",
        "Worse than MonteCarlo: K3Loss.",
        "Inconclusive against MonteCarlo: K2Loss.",
    ]
    table = page[page.index("Each arm against MonteCarlo") :]
    header, *rows = re.findall(r"<tr>(.*?)</tr>", table)[:4]
    names = re.findall(r">([^<]+)</th>", header)
    assert names == ["Arm", "Verdict", "Difference", "Interval", "p", "KL ratio"]
    assert [re.findall(r">([^<]+)</t", row)[0] for row in rows] == [*scales, "K2Loss"]
    assert not re.search(r"\bnan\b", re.sub(r'src="data:[^"]*"', "", page))
    numbers = json.loads((runs / "results.json").read_text())
    grid = load_sweep(runs).grid
    control = [place for place in grid if place[0] == "MonteCarlo"]
    for one in numbers["comparisons"]:
        kl = np.array(
            [[grid[arm, *place[1:]].final["kl"] for arm in (one["treatment"], place[0])] for place in control]
        )
        assert one["kl"]["estimate"] == pytest.approx((kl[:, 0] - kl[:, 1]).mean())
        assert one["kl_ratio"] == pytest.approx(np.exp(np.log(kl[:, 0] / kl[:, 1]).mean()))
        assert one["objective"] is None
    assert verify(runs).differences == []
