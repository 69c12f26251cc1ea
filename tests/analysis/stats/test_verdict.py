from dataclasses import replace

import numpy as np
import pytest
from designs import draw_pairs, pairs_of, swapped
from scipy import stats

from analysis.stats import Claim, Outcome, Rules, Verdict, compare
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import matched_kl
from analysis.stats.primary import corrected
from analysis.stats.swaps import SwapTest
from analysis.stats.text import number, signed

PRIMARY = Claim("objective", "J", "higher J", "lower J")


def verdict(value=0.5, p=0.01, *, attainable=0.001, margin=None, claim=PRIMARY) -> Verdict:
    test = SwapTest(p, attainable, 10, 1024, exact=True)
    return Verdict(claim, "A", "B", Estimate(value, 0.1, 9), "units", test, 5, margin=margin)


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
    decided, undecided = (verdict(), verdict(-0.5)), (verdict(p=0.3), verdict(p=0.5, attainable=0.1))
    for made in (*decided, *undecided, verdict(0.0, 0.9, margin=0.5)):
        text = made.sentence.replace("\u00a0", " ")
        p_value = f"p = {number(made.test.p_value, 2)}"
        for part in (signed(made.estimate.value), "units", "95% CI", p_value, "n = 5 replicates"):
            assert part in text, (part, text)
        assert "significant" not in text


def test_equivalence_needs_an_equivalence_test():
    text = verdict(0.0, 0.99).sentence
    assert "inconclusive" in text
    assert "detects a difference of about" in text


def test_lower_can_be_better():
    claim = Claim("V", "variance", "less variance", "more variance", higher_is_better=False)
    assert verdict(-0.5, claim=claim).label == "less variance"
    assert verdict(0.5, claim=claim).label == "more variance"


def test_a_withheld_verdict_has_no_evidence():
    made = replace(verdict(), withheld="partial sweep")
    assert made.outcome is Outcome.NO_VERDICT
    assert made.sentence == "There is no verdict on J: partial sweep."
    assert Outcome.NO_VERDICT.name.lower() == "no_verdict"


def test_interval_equivalence_and_detectable_difference_are_at_the_level_of_a_comparison():
    finding = verdict(0.0, 0.9, margin=0.2)
    (alone,), (among,) = corrected([finding], 0.05), corrected([finding], 0.05, planned=4)
    assert alone.interval.high == pytest.approx(0.1 * stats.t.ppf(0.975, 9))
    assert among.interval.high == pytest.approx(0.1 * stats.t.ppf(1 - 0.0125 / 2, 9))
    assert "98.75% CI" in among.sentence
    # TOST: p = P(t > 2) = 0.038
    assert alone.outcome is Outcome.EQUIVALENT
    assert among.outcome is Outcome.INCONCLUSIVE
    assert number(finding.estimate.detectable(0.0125)) in among.sentence
    assert among.attainable == pytest.approx(0.004)


def test_a_share_never_decides():
    # the treatment takes the whole frontier by spread: its better half dominates, its worse half is far off
    wide = np.array([3.0, -3.0] * 5)
    pairs = pairs_of([[1.0, 1.0]] * 10, np.stack([wide + 0.01 * np.arange(10), np.zeros(10)], axis=1))
    made = compare([pairs], Rules())[0]
    assert made.of("frontier_share").share.value == 1.0
    assert "better" not in made.of("frontier_share").label
    assert made.primary.outcome is Outcome.INCONCLUSIVE


def test_three_families_each_corrected_in_one_step():
    from statsmodels.stats.multitest import multipletests

    designs = [draw_pairs(np.random.default_rng(seed), lift=lift) for seed, lift in enumerate((2, 1.5, 0.1))]
    made = compare(designs, Rules(comparisons=4, corner=(9.0, -1.0)))
    primary = [c.primary for c in made]
    expected = multipletests([*(v.test.p_value for v in primary), 1.0], method="bonferroni")[1]
    np.testing.assert_allclose([v.adjusted for v in primary], expected[:3])
    assert [v.outcome for v in primary] == [Outcome.BETTER, Outcome.BETTER, Outcome.INCONCLUSIVE]
    # the third does not pass the gate, the fourth has no runs: both count as p = 1
    gated = [c.matched for c in made]
    expected = multipletests([gated[0].test.p_value, gated[1].test.p_value, 1.0, 1.0], method="bonferroni")[1]
    np.testing.assert_allclose([v.adjusted for v in gated], [*expected[:2], np.nan])
    assert gated[2].untested == "the test of J does not reject"
    assert gated[2].estimate.value == pytest.approx(matched_kl(designs[2]).estimate.value)
    secondary = [v for c in made for v in c.secondary]
    # and so do the six tests of curves, the one of collapses, and those of the fourth comparison
    planned = 4 * (7 + 6 + 1)
    p_values = [*(v.test.p_value for v in secondary), *[1.0] * (planned - len(secondary))]
    expected = multipletests(p_values, method="bonferroni")[1][: len(secondary)]
    np.testing.assert_allclose([v.adjusted for v in secondary], expected)
    assert {v.level for v in secondary} == {0.05 / planned}
    frontier = ["frontier_share", "replicate_share", "net_dominance", "matched_dominance", "hypervolume"]
    assert [v.claim.key for v in made[1].secondary] == ["kl", "reward", *frontier]


def test_matched_kl_is_never_tested_without_a_rejection_of_j():
    """Neither equivalence in J nor a clear gap at matched KL leads to a test."""
    wide = draw_pairs(np.random.default_rng(0), replicates=10)
    assert compare([wide], Rules())[0].primary.outcome is Outcome.INCONCLUSIVE
    assert compare([wide], Rules(margins={"objective": 1.0}))[0].primary.outcome is Outcome.EQUIVALENT
    kl = np.linspace(1, 9, 10)[:, None] * np.array([1.3, 1.0])
    jitter = 0.01 * np.random.default_rng(1).normal(size=(10, 2))
    index = np.arange(10)[:, None] // 5
    # more reward at a given KL, all of it paid for: J is the same
    paid = pairs_of(kl, 0.1 * (1 + index) * kl + jitter, beta_index=index[:, 0])
    for pairs in (wide, paid):
        made = compare([pairs], Rules(margins={"objective": 1.0}))[0]
        assert made.matched.outcome is Outcome.NOT_TESTED
        assert np.isnan(made.matched.adjusted)
        assert "not tested, because the test of J does not reject" in made.matched.sentence


def test_a_refused_comparison_has_no_number():
    pairs = draw_pairs(np.random.default_rng(0), lift=9.0)
    pairs.kl[:, 0] *= 0.02
    made = compare([pairs], Rules())[0]
    assert made.primary.outcome is Outcome.BETTER
    assert made.matched.sentence.startswith(
        "Reward at matched KL, RaoBlackwell against MonteCarlo, is not compared: their KLs do not overlap "
    )
    assert np.isnan(made.matched.estimate.value)


def test_a_plan_that_decides_by_the_kl_has_no_claims_on_rewards():
    pairs = draw_pairs(np.random.default_rng(0), replicates=6)
    pairs.kl[:, 0] *= 0.5
    pairs.reward[:] = 0
    made = compare([pairs], Rules(outcome="kl", margins={"kl": 9.0}))[0]
    assert made.primary.claim.key == "kl"
    assert made.primary.unit == "nats"
    expected = np.mean([(pairs.kl[pairs.beta_index == b] @ [1, -1]).mean() for b in range(3)])
    assert made.primary.estimate.value == pytest.approx(expected)
    assert made.primary.label == "a lower KL"
    assert made.matched.untested == "the plan decides by the KL alone"
    assert made.secondary == ()


def test_a_run_that_diverged_alone_is_tested_by_mcnemar():
    from statsmodels.stats.contingency_tables import mcnemar

    pairs = draw_pairs(np.random.default_rng(0), replicates=6)
    pairs.kl[:7, 1] = np.nan
    pairs.kl[9, 0] = np.nan
    found = compare([pairs], Rules())[0].of("collapses")
    assert found.test.p_value == pytest.approx(mcnemar([[0, 1], [7, 0]], exact=True).pvalue)
    assert found.estimate.value == -6


def test_a_clear_lift_is_better_and_its_mirror_worse():
    pairs = draw_pairs(np.random.default_rng(0), lift=2.0, replicates=8)
    assert compare([pairs], Rules())[0].primary.outcome is Outcome.BETTER
    turned = swapped(pairs, np.ones(len(pairs), dtype=bool))
    assert compare([turned], Rules())[0].primary.outcome is Outcome.WORSE


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
def test_small_designs_cannot_reject(pairs):
    made = compare([pairs], Rules())[0]
    assert made.primary.outcome is Outcome.CANNOT_REJECT
    assert made.matched.outcome is Outcome.NOT_TESTED
    for found in (made.primary, *made.secondary):
        assert found.outcome is Outcome.CANNOT_REJECT
        assert "cannot reject" in found.sentence


def test_a_diverged_run_ranks_last_and_values_are_compared_by_rank():
    pairs = draw_pairs(np.random.default_rng(0), replicates=6)
    pairs.kl[0, 1] = np.nan
    made = compare([pairs], Rules(margins={"objective": 9.0}))[0]
    assert "rank" in made.primary.unit
    assert made.primary.margin is None


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
def test_numbers_are_formatted(value, text):
    assert number(value).replace("e−07", "e−7") == text
