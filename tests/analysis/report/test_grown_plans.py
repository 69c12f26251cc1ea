"""Plans that are sequential or were changed after results: decided by the e-process."""

import json

import pytest
from reading import numbers
from synthetic import edit_plan, write_sweep

from analysis.report.assessment import load_assessment
from analysis.report.numbers import summary_numbers
from analysis.report.sections.summary import summary

DESIGN = {"replicates": 5, "lift": {"RaoBlackwell": 0.6}}


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
    (conclusion,) = summary(assessment).conclusions
    why = "the plan is sequential" if sequential else "the plan was changed after results were published"
    assert conclusion.headline.endswith(f"(decided by the e-process of J = reward − β·KL, because {why}).")
    assert conclusion.sentences[0].startswith("Exploratory: ")


def test_a_small_effect_is_inconclusive_by_the_e_process_even_if_the_swap_test_rejects(tmp_path):
    runs = write_sweep(tmp_path, replicates=5, betas={0: 0.1, 1: 0.2}, lift={"RaoBlackwell": 0.35})
    assert numbers(runs)["comparisons"][0]["outcome"] == "better"
    grow(runs)
    (one,) = numbers(runs)["comparisons"]
    assert (one["outcome"], one["decided_by"]) == ("inconclusive", "e_process")
    assert one["objective"]["p_adjusted"] <= 0.05
    (conclusion,) = summary(load_assessment(runs)).conclusions
    assert conclusion.headline.startswith("Inconclusive on RaoBlackwell against MonteCarlo: E = ")


def test_a_level_or_control_changed_after_results_has_no_effect_on_the_threshold(tmp_path):
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


def test_pairs_added_by_a_later_version_come_after_earlier_pairs(tmp_path):
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
