"""A plan that decides by the KL alone, as for distillation: without reward, frontier and matched KL."""

import json

import numpy as np
import pytest
from synthetic import write_sweep

from analysis.checks import load_sweep
from analysis.report.build import build
from analysis.report.verify import verify


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
    assert 'RaoBlackwell</th><td>better</td><td class="n">−' in page
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
    verdicts = numbers["sections"]["verdict"]["verdicts"]["RaoBlackwell"]
    assert [verdict["claim"] for verdict in verdicts] == ["kl", "spread"]
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
