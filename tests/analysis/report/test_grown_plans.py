"""Plans that were changed after results could have been seen have no verdict."""

from reading import numbers, text_of
from synthetic import edit_plan, write_sweep


def test_a_plan_grown_after_results_has_no_verdict_and_the_page_says_what_would_decide(tmp_path):
    runs = write_sweep(tmp_path, replicates=5, lift={"RaoBlackwell": 0.6})
    assert numbers(runs)["comparisons"][0]["outcome"] == "better"

    def grow(document):
        before = document["history"][-1]
        document["history"].append(
            {**before, "previous": document["hash"], "published": 9, "changes": ["grown"]}
        )

    edit_plan(runs, grow)
    found = numbers(runs)
    assert found["comparisons"][0]["outcome"] == "no_verdict"
    assert found["plan"]["changed_after_results"]
    text = text_of(runs)
    assert "There is no verdict: the plan was changed after results could have been seen" in text
    assert "needs another root_seed and directory" in text
    assert "locked before its first of 30 runs." in text
