import numpy as np
import pytest
from designs import draw_pairs, pairs_of

from analysis.stats import Claim, Decision, Outcome, Rules, Verdict, compare
from analysis.stats.intervals import Estimate
from analysis.stats.swaps import SwapTest
from analysis.stats.text import number, signed

PRIMARY = Claim("objective", "J", "higher J", "lower J", primary=True)


def verdict(value=0.5, p=0.01, *, attainable=0.001, margin=None, claim=PRIMARY, error=0.1) -> Verdict:
    test = SwapTest(p, attainable, 10, 1024, exact=True)
    return Verdict(claim, "A", "B", Estimate(value, error, 9), "units", test, p, attainable, 5, margin=margin)


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        (verdict(0.5, 0.01), Outcome.BETTER),
        (verdict(-0.5, 0.01), Outcome.WORSE),
        (verdict(0.5, 0.2), Outcome.INCONCLUSIVE),
        (verdict(0.0, 0.9, margin=0.5), Outcome.EQUIVALENT),
        (verdict(0.0, 0.9, margin=0.1), Outcome.INCONCLUSIVE),
        (verdict(0.5, 0.5, attainable=0.06), Outcome.CANNOT_REJECT),
        (verdict(float("nan"), 0.01), Outcome.INCONCLUSIVE),
    ],
)
def test_outcome_follows_from_the_evidence(made, outcome):
    assert made.outcome is outcome


def test_every_sentence_names_estimate_unit_interval_p_and_n():
    for made in (
        verdict(),
        verdict(-0.5),
        verdict(p=0.3),
        verdict(0.0, 0.9, margin=0.5),
        verdict(p=0.5, attainable=0.1),
    ):
        text = made.sentence.replace("\u00a0", " ")
        for part in (
            signed(made.estimate.value),
            "units",
            "95% CI",
            f"p = {number(made.test.p_value, 2)}",
            "n = 5 replicates",
        ):
            assert part in text, (part, text)
        assert "significant" not in text


def test_no_difference_is_never_said_without_an_equivalence_test():
    text = verdict(0.0, 0.99).sentence
    assert "inconclusive" in text
    assert "smallest difference" in text


def test_lower_can_be_better():
    claim = Claim("V", "variance", "less variance", "more variance", higher_is_better=False)
    assert verdict(-0.5, claim=claim).label == "less variance"
    assert verdict(0.5, claim=claim).label == "more variance"


def test_only_primary_claims_decide():
    with pytest.raises(ValueError, match="cannot decide"):
        Decision(verdict(), verdict(claim=Claim("T1", "share", "more", "fewer")))


@pytest.mark.parametrize(
    ("objective", "matched", "outcome"),
    [
        (verdict(), verdict(p=0.5), Outcome.BETTER),
        (verdict(p=0.5), verdict(-0.5), Outcome.WORSE),
        (verdict(), verdict(-0.5), Outcome.INCONCLUSIVE),
        (verdict(0.0, 0.9, margin=0.5), verdict(0.0, 0.9, margin=0.5), Outcome.EQUIVALENT),
        (verdict(0.0, 0.9, margin=0.5), verdict(0.0, 0.9), Outcome.INCONCLUSIVE),
        (verdict(p=0.5, attainable=0.1), verdict(p=0.5, attainable=0.1), Outcome.CANNOT_REJECT),
    ],
)
def test_the_decision_needs_a_primary_outcome_and_no_contradiction(objective, matched, outcome):
    decision = Decision(objective, matched)
    assert decision.outcome is outcome
    assert decision.headline.startswith("A is better") == (outcome is Outcome.BETTER)


def test_a_share_alone_never_says_better():
    # the treatment takes the whole frontier by spread: its better half dominates, its worse half is far off
    wide = np.array([3.0, -3.0] * 5)
    pairs = pairs_of([[1.0, 1.0]] * 10, np.stack([wide + 0.01 * np.arange(10), np.zeros(10)], axis=1))
    made = compare([pairs], Rules())[0]
    assert made.share.share.value == 1.0
    assert "better" not in made.share.label
    assert made.decision.outcome is Outcome.INCONCLUSIVE


def test_holm_spans_all_comparisons():
    from statsmodels.stats.multitest import multipletests

    designs = [draw_pairs(np.random.default_rng(seed), lift=0.5) for seed in range(3)]
    made = compare(designs, Rules(cuts=(4.0,)))
    primary = [v for c in made for v in (c.decision.objective, c.decision.matched)]
    expected = multipletests([v.test.p_value for v in primary], method="holm")[1]
    np.testing.assert_allclose([v.adjusted for v in primary], expected)
    secondary = [v for c in made for v in c.secondary]
    expected = multipletests([v.test.p_value for v in secondary], method="holm")[1]
    np.testing.assert_allclose([v.adjusted for v in secondary], expected)
    assert [v.claim.key for v in made[1].secondary] == ["T1", "T1 below KL = 4", "T2", "T3", "T6"]


def test_a_clear_lift_is_better_and_its_mirror_worse():
    pairs = draw_pairs(np.random.default_rng(0), lift=2.0, replicates=8)
    assert compare([pairs], Rules())[0].decision.outcome is Outcome.BETTER
    turned = pairs.swapped(np.ones(len(pairs), dtype=bool))
    assert compare([turned], Rules())[0].decision.outcome is Outcome.WORSE


def test_a_margin_allows_equivalence():
    pairs = draw_pairs(np.random.default_rng(0), replicates=10)
    margins = {"objective": 1.0, "matched_kl": 1.0}
    assert compare([pairs], Rules(margins=margins))[0].decision.outcome is Outcome.EQUIVALENT
    assert compare([pairs], Rules())[0].decision.outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    "pairs",
    [
        draw_pairs(np.random.default_rng(0), replicates=1),
        pairs_of([[1, 2]], [[2, 1]]),
        pairs_of(np.full((4, 2), np.nan), np.zeros((4, 2))),
        pairs_of([[1, 1]] * 6, [[2, 2]] * 6),
    ],
    ids=["one replicate", "one pair", "all diverged", "all tied"],
)
def test_poor_designs_say_that_they_cannot_reject(pairs):
    made = compare([pairs], Rules())[0]
    assert made.decision.outcome is Outcome.CANNOT_REJECT
    for found in made.verdicts:
        assert found.outcome is Outcome.CANNOT_REJECT
        assert "cannot reject" in found.sentence


def test_one_diverged_run_counts_as_worst_and_switches_to_ranks():
    pairs = draw_pairs(np.random.default_rng(0), replicates=6)
    pairs.kl[0, 1] = np.nan
    made = compare([pairs], Rules(margins={"objective": 9.0}))[0]
    assert "rank" in made.decision.objective.unit
    assert made.decision.objective.margin is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0459, "0.0459"),
        (-1.5, "−1.50"),
        (12345.6, "12300"),
        (1e-20, "0"),
        (3e-7, "3.00e−7"),
        (1.0, "1.00"),
        (float("inf"), "∞"),
    ],
)
def test_numbers_for_reading(value, text):
    assert number(value).replace("e−07", "e−7") == text
