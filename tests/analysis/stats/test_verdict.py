from dataclasses import replace

import numpy as np
import pytest
from designs import draw_pairs, pairs_of, swapped
from scipy import stats

from analysis.stats import Claim, Outcome, Rules, Verdict, compare
from analysis.stats.comparison import corrected
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import matched_kl
from analysis.stats.swaps import SwapTest
from analysis.stats.text import number, signed

PRIMARY = Claim("objective", "J", "higher J", "lower J")


def verdict(value=0.5, p=0.01, *, attainable=0.001, margin=None, claim=PRIMARY, gain=9.0) -> Verdict:
    test = SwapTest(p, attainable, 10, 1024, exact=True)
    rest = {"margin": margin, "gain": gain and Estimate(gain, 0.1, 9)}
    return Verdict(claim, "A", "B", Estimate(value, 0.1, 9), "units", test, 5, **rest)


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
        (verdict(0.0, 0.9, margin=0.5, gain=0.6), Outcome.INCONCLUSIVE),
        (verdict(0.0, 0.9, margin=0.5, gain=0.8), Outcome.EQUIVALENT),
        (verdict(0.0, 0.9, margin=0.5, gain=None), Outcome.INCONCLUSIVE),
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


def test_a_difference_within_the_margin_needs_a_control_that_gained_more_than_it():
    """Its 95 % interval is .226 wide on each side."""
    few, none = (
        verdict(0.0, 0.9, margin=0.5, gain=0.6).sentence,
        verdict(0.0, 0.9, margin=0.5, gain=None).sentence,
    )
    assert "within the margin, but the control gained 0.600 (0.374 to 0.826)" in few
    assert "whether anything trained is unknown" in none


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
    assert among.detectable > alone.detectable
    assert among.attainable == pytest.approx(0.004)


def test_two_families_each_corrected_in_one_step():
    from statsmodels.stats.multitest import multipletests

    designs = [draw_pairs(np.random.default_rng(seed), lift=lift) for seed, lift in enumerate((2, 1.5, 0.1))]
    made = compare(designs, Rules(comparisons=4))
    primary = [c.primary for c in made]
    expected = multipletests([*(v.test.p_value for v in primary), 1.0], method="bonferroni")[1]
    np.testing.assert_allclose([v.adjusted for v in primary], expected[:3])
    assert [v.outcome for v in primary] == [Outcome.BETTER, Outcome.BETTER, Outcome.INCONCLUSIVE]
    secondary = [v for c in made for v in c.secondary]
    # and so do the three of the fourth comparison, which has no runs
    p_values = [*(v.test.p_value for v in secondary), *[1.0] * 3]
    expected = multipletests(p_values, method="bonferroni")[1][: len(secondary)]
    np.testing.assert_allclose([v.adjusted for v in secondary], expected)
    assert {v.level for v in secondary} == {0.05 / 12}
    assert [v.claim.key for v in made[1].secondary] == ["kl", "reward", "spread"]
    assert made[1].matched.estimate.value == matched_kl(designs[1]).estimate.value


def test_a_plan_that_decides_by_the_kl_has_no_claims_on_rewards():
    pairs = draw_pairs(np.random.default_rng(0), replicates=6)
    pairs.kl[:, 0] *= 0.5
    pairs.reward[:] = 0
    made = compare([pairs], Rules(outcome="kl", margin=9.0))[0]
    assert made.primary.claim.key == "kl"
    assert made.primary.unit == "nats"
    expected = np.mean([(pairs.kl[pairs.beta_index == b] @ [1, -1]).mean() for b in range(3)])
    assert made.primary.estimate.value == pytest.approx(expected)
    assert made.primary.label == "a lower KL"
    assert made.matched is None
    assert [v.claim.subject for v in made.secondary] == ["the spread of log KL between replicates"]


def test_a_clear_lift_is_better_and_its_mirror_worse():
    pairs = draw_pairs(np.random.default_rng(0), lift=2.0, replicates=8)
    assert compare([pairs], Rules())[0].primary.outcome is Outcome.BETTER
    turned = swapped(pairs, np.ones(len(pairs), dtype=bool))
    assert compare([turned], Rules())[0].primary.outcome is Outcome.WORSE


def test_a_design_that_cannot_reject_says_so():
    few = draw_pairs(np.random.default_rng(0), replicates=1)  # three pairs, swapped
    one = pairs_of([[1, 2]], [[2, 1]])
    for pairs in (few, one):
        found = compare([pairs], Rules())[0].primary
        assert found.outcome is Outcome.CANNOT_REJECT
        assert "too few runs for a test: the smallest possible p" in found.sentence


@pytest.mark.parametrize("difference", [0.0, 1e-9])
def test_arms_that_do_the_same_have_no_verdict(difference):
    """By the signs of rounding errors they earned 0.000000 more, p = 0.031."""
    reward = 1 + 0.1 * np.arange(6.0)[:, None] + np.array([difference, 0.0])
    found = compare([pairs_of(np.ones((6, 2)), reward)], Rules())[0].primary
    assert found.outcome is Outcome.NO_VERDICT
    assert "the arms do the same" in found.sentence


def test_a_run_without_a_value_leaves_single_differences_undecided():
    """One diverged run of the control does not swap the t test for one of ranks, as .13 became .047."""
    pairs = draw_pairs(np.random.default_rng(0), replicates=8, betas=(0.1,), lift=9.0)
    assert compare([pairs], Rules())[0].primary.outcome is Outcome.BETTER
    pairs.kl[0, 1] = np.nan
    found = compare([pairs], Rules())[0].primary
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "ranks do not take the place of the planned t test" in found.sentence


def test_a_diverged_run_ranks_last_and_values_are_compared_by_rank():
    pairs = draw_pairs(np.random.default_rng(0), replicates=6)
    pairs.kl[0, 1] = np.nan
    made = compare([pairs], Rules(margin=9.0))[0]
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
