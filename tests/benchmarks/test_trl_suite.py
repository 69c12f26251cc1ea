"""What `benchmarks.peers.trl_suite` says of the outcomes of TRL's tests."""

from benchmarks.peers.trl_suite import TESTS, compare

RLOO = TESTS[0]
REFUSED = "lit_klrb.errors.ConfigurationError: beta: must not be 0: it is the weight of the estimated KL"


def test_a_test_that_ends_otherwise_than_expected_is_a_problem():
    plain = dict.fromkeys([f"{RLOO}::test_{name}" for name in ("train", "eval", "train_beta_zero")], "passed")
    plain[f"{RLOO}::test_hub"] = "OSError: offline"
    as_expected = {**plain, f"{RLOO}::test_train_beta_zero": REFUSED}
    table, problems = compare(plain, as_expected)
    assert f"| {RLOO} | 3 | 2 |" in table
    assert "| test_train_beta_zero | beta: must not be 0: it is the weight of the estimated KL |" in table
    assert problems == []
    for name, outcome in {"eval": "KeyError: 1", "train": REFUSED, "train_beta_zero": "passed"}.items():
        _, (problem,) = compare(plain, as_expected | {f"{RLOO}::test_{name}": outcome})
        assert problem.startswith(f"test_{name}: ")


def test_a_suite_in_which_nothing_passes_is_a_problem():
    name = f"{TESTS[0]}::TestRLOOTrainer::test_train"
    assert compare({name: "OSError: no such model"}, {})[1] == ["no test passes with TRL alone"]
    assert compare({name: "passed"}, {name: "passed"})[1] == []
