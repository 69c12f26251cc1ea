"""The answer of a sweep in one sentence."""

import re

import numpy as np
import pytest
from scipy import stats
from synthetic import diverge, grid_results, write_sweep

from analysis.report.assessment import load_assessment, meaning_of, title_of
from analysis.report.sections.summary import summary
from analysis.stats import Outcome

ARMS = ("MonteCarlo", "RaoBlackwell", "RaoBlackwellControlVariate")
OPEN = "It is open whether any of 2 arms"


@pytest.mark.parametrize(
    ("margins", "lifts", "title"),
    [
        ({}, (0.0, 0.0), f"{OPEN} has a higher J than MonteCarlo"),
        ({}, (-0.5, 0.0), f"{OPEN} has a higher J than MonteCarlo"),
        ({}, (-0.5, -0.5), "Each of 2 arms is worse than MonteCarlo"),
        ({"objective": 0.3}, (0.0, 0.0), "Each of 2 arms is equivalent to MonteCarlo"),
        ({"objective": 0.3}, (-0.9, 0.0), "No arm of 2 is better than MonteCarlo"),
    ],
    ids=["open", "worse and open", "worse", "equivalent", "worse and equivalent"],
)
def test_no_arm_is_better_only_if_every_verdict_says_so(tmp_path, margins, lifts, title):
    lift = dict(zip(ARMS[1:], lifts, strict=True))
    runs = write_sweep(tmp_path, estimators=ARMS, replicates=6, lift=lift, primary={"margins": margins})
    assert title_of(load_assessment(runs)).startswith(f"{title}; MonteCarlo gained 1.")


def test_the_title_has_the_difference_and_what_the_control_gained_with_intervals(tmp_path):
    runs = write_sweep(tmp_path, replicates=6, betas={0: 0.1}, lift={"RaoBlackwell": -0.6})
    found = grid_results(runs)

    def objective(arm, replicate):
        final = found[arm, 0, replicate]["final"]
        return final["reward"] - 0.1 * final["kl"]

    ends = {arm: np.array([objective(arm, replicate) for replicate in range(6)]) for arm in ARMS[:2]}
    start = 0.4 - 0.1 * 0.4  # in all runs
    lower = ends["MonteCarlo"] - ends["RaoBlackwell"]
    shown = (
        f"RaoBlackwell: J {lower.mean():.3f} lower than MonteCarlo (95 % interval {interval(lower, 3)}); "
        f"MonteCarlo gained {(ends['MonteCarlo'] - start).mean():.3f} "
        f"({interval(ends['MonteCarlo'] - start, 3)}) from {start:.3f} at the start"
    )
    digits = re.compile(r"\d+\.\d+")
    title = title_of(load_assessment(runs))
    assert digits.sub("#", title) == digits.sub("#", shown)
    assert [*map(float, digits.findall(title))] == pytest.approx(
        [*map(float, digits.findall(shown))], abs=6e-3
    )


def interval(values, digits):
    return " to ".join(f"{end:.{digits}f}" for end in stats.ttest_1samp(values, 0).confidence_interval())


def test_a_difference_within_the_margin_is_no_equivalence_where_nothing_trains(tmp_path):
    """Runs that end where they start differ by as little as runs that train alike."""

    def untrained(point, made):
        made["final"]["reward"] += 0.4 - 0.1 * (0.4 - made["final"]["kl"]) - np.sqrt(made["final"]["kl"])
        return made

    design = {"replicates": 8, "betas": {0: 0.1}, "primary": {"margins": {"objective": 0.3}}}
    trained, other = (
        load_assessment(write_sweep(tmp_path / name, edit=edit, **design))
        for name, edit in (("trained", lambda point, made: made), ("untrained", untrained))
    )
    assert trained.comparisons[0].primary.outcome is Outcome.EQUIVALENT
    assert other.comparisons[0].primary.outcome is Outcome.INCONCLUSIVE
    assert "which may be no more than the margin" in other.comparisons[0].primary.sentence
    assert any("J does not rise in training" in line for line in summary(other).paragraphs)
    assert not any("J does not rise" in line for line in summary(trained).paragraphs)


def test_a_clear_difference_below_the_margin_is_said_to_be(tmp_path):
    primary = {"margins": {"objective": 2.0}}
    made = write_sweep(tmp_path / "less", replicates=6, lift={"RaoBlackwell": 0.6}, primary=primary)
    assert "The planned margin is ±2.00; RaoBlackwell by less than it." in meaning_of(load_assessment(made))
    made = write_sweep(tmp_path / "more", replicates=6, lift={"RaoBlackwell": -4.0}, primary=primary)
    assert "The planned margin is ±2.00." in meaning_of(load_assessment(made))


def test_every_page_says_for_which_prompts_and_where_others_may_decide_otherwise(tmp_path):
    """The arm earns more on each seed, by what it earns on one of eight prompts."""

    def edit(point, made):
        arm, _, replicate = point
        final = made["final"]
        more = np.array([8.0 if arm == "RaoBlackwell" else 0.0, *[0.0] * 7]) + 0.01 * replicate
        rewards = final["kl"] ** 0.5 + more
        error = float(rewards.std(ddof=1)) / 8**0.5
        final |= {"reward": float(rewards.mean()), "reward_se": error, "kl_se": 0.0}
        return {**made, "prompts": {"reward": rewards.tolist(), "kl": [final["kl"]] * 8}}

    runs = write_sweep(tmp_path, replicates=6, betas={0: 0.1}, edit=edit)
    assessment = load_assessment(runs)
    assert assessment.comparisons[0].primary.outcome is Outcome.BETTER
    first, second, *_ = [line for line in meaning_of(assessment) if "prompts" in line]
    assert first.endswith("over seeds, for the 8 prompts that were evaluated.")
    assert second == "Over seeds and prompts, RaoBlackwell may be as good as the control: see the table."
    lost = grid_results(runs)["MonteCarlo", 0, 0]["id"]
    (runs / "results" / f"{lost}.json").unlink()
    partial = load_assessment(runs)
    assert partial.withheld == "partial sweep"
    assert [*meaning_of(partial)] == [
        "The intervals of this page are over seeds, for the 8 prompts that were evaluated."
    ]


def test_where_the_kl_decides_it_is_open_which_arm_ends_nearer(tmp_path):
    runs = write_sweep(tmp_path, estimators=ARMS, replicates=6, primary={"outcome": "kl"})
    assert title_of(load_assessment(runs)).startswith(
        f"{OPEN} has a lower KL than MonteCarlo; MonteCarlo lowered"
    )


def test_where_the_kl_decides_the_title_names_the_arm_that_ends_nearest(tmp_path):
    def nearer(point, made):
        made["final"]["kl"] *= {"RaoBlackwell": 0.3, "RaoBlackwellControlVariate": 0.6}.get(point[0], 1.0)
        return made

    runs = write_sweep(tmp_path, estimators=ARMS, replicates=6, primary={"outcome": "kl"}, edit=nearer)
    assert title_of(load_assessment(runs)).startswith("RaoBlackwell: KL ")


def test_too_few_runs_are_no_evidence_that_no_arm_is_better(tmp_path):
    assessment = load_assessment(write_sweep(tmp_path, estimators=ARMS, replicates=1, betas={0: 0.1}))
    assert title_of(assessment).startswith("These runs are too few to tell any of 2 arms from MonteCarlo")


def test_what_a_control_gained_is_unknown_without_its_start(tmp_path):
    def bare(point, made):
        del made["curves"]["val/kl"], made["curves"]["val/reward"]
        return made

    config = {"trainer": {"num_sanity_val_steps": 0}}
    runs = write_sweep(tmp_path, replicates=6, edit=bare, lift={"RaoBlackwell": 0.6}, config=config)
    for path in (runs / "results").glob("*.json"):
        if '"stage":"dpo"' in path.read_text():
            path.unlink()
    assert title_of(load_assessment(runs)).endswith("; what MonteCarlo gained in training is unknown")


@pytest.mark.parametrize("count", [2, 3])
def test_arms_whose_runs_all_diverged_are_not_too_few(tmp_path, count):
    made = write_sweep(tmp_path, estimators=ARMS[:count], replicates=6, edit=diverge())
    title = title_of(load_assessment(made))
    assert title == f"All runs of {', '.join(ARMS[1:count])} and MonteCarlo diverged"
