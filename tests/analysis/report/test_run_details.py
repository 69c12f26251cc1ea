"""Sections on what runs wrote and how they were set."""

from synthetic import write_sweep

from analysis.report.assessment import load_assessment
from analysis.report.sections.completions import completions
from analysis.report.sections.hyperparameters import hyperparameters


def with_details(point, made):
    arm, index, replicate = point
    texts = {"text_at_start": "The film", "text": f"The film by {arm} {index} {replicate}"}
    settings = {"kl.beta": index, "model.learning_rate": 0.1, "kl.estimator.class_path": arm}
    return {
        **made,
        "completions": [{**texts, "reward_at_start": 0.5, "reward": replicate + 0.25}],
        "settings": settings,
    }


def test_the_same_prompt_under_every_arm_not_selected(tmp_path):
    section = completions(load_assessment(write_sweep(tmp_path, replicates=3, edit=with_details)))
    assert [list(map(len, table.rows)) for table in section.tables] == [[3, 3, 3]]
    assert section.tables[0].rows == [
        ("at the start", "0.500", "The film"),
        ("MonteCarlo", "0.250", "The film by MonteCarlo 1 0"),
        ("RaoBlackwell", "0.250", "The film by RaoBlackwell 1 0"),
    ]
    assert len(section.details) == 2
    assert "replicate 0, seed 1000" in section.tables[0].caption


def test_what_differs_between_arms_is_shown_and_the_rest_is_shared(tmp_path):
    section = hyperparameters(load_assessment(write_sweep(tmp_path, edit=with_details)))
    (different,), (shared,) = section.tables, section.details
    assert different.rows == [("kl.estimator.class_path", "MonteCarlo", "RaoBlackwell")]
    assert shared.rows == [("model.learning_rate", "0.1")]


def test_runs_that_say_nothing_have_no_section(tmp_path):
    assessment = load_assessment(write_sweep(tmp_path))
    assert completions(assessment) is None
    assert hyperparameters(assessment) is None
