"""Logs of other software are read as runs; errors are one line with their place."""

import json
import math

import pytest

from analysis.imports.foreign import add_rows, matching_files
from analysis.imports.logs import read_rows
from lit_klrb.errors import ConfigurationError

COLUMNS = {"arm": "method", "beta": "beta", "replicate": "seed", "reward": "reward", "kl": "kl"}


X = {"[x].csv": {"arm": "[", "replicate": "x]"}}


def collect(rows, columns, known=None):
    runs = {}
    add_rows(runs, rows, columns, known or {}, {})
    return list(runs.values())


@pytest.fixture
def write(tmp_path):
    def written(text, name="log.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return written


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ("{arm}{arm}.csv", {"mcmc.csv": {"arm": "mc"}}),
        ("{arm}{replicate}.csv", {"mcmc.csv": {"arm": "m", "replicate": "cmc"}, **X}),
        ("{arm}{beta}/{replicate}.csv", {"rb0.1/7.csv": {"arm": "rb", "beta": "0.1", "replicate": "7"}}),
        ("[{arm}].csv", {"[x].csv": {"arm": "x"}}),
    ],
)
def test_placeholders_may_be_adjacent(tmp_path, files, found):
    (tmp_path / "rb0.1").mkdir()
    for name in ("mcmc.csv", "[x].csv", "rb0.1/7.csv"):
        (tmp_path / name).touch()
    matches = matching_files(tmp_path, files)
    assert {path.relative_to(tmp_path).as_posix(): values for path, values in matches} == found


@pytest.mark.parametrize("files", ["", ".", "/a", "../{arm}", "a\0", "**", "{arm}{arm}{arm}", "[", "a?"])
def test_a_template_without_files_is_one_line(tmp_path, files):
    (tmp_path / "aab").touch()
    with pytest.raises(ConfigurationError, match=r"^files: "):
        matching_files(tmp_path, files)


def test_a_csv_with_blanks_after_commas_and_a_byte_order_mark(write):
    rows = read_rows(write("\ufeffmethod, beta , seed, reward, kl\n\nmc, 0.1, 3, 1.5, 2\n rb,0.1,3,nan,2\n"))
    assert [row.place.rpartition(": ")[2] for row in rows] == ["line 3", "line 4"]
    mc, rb = collect(rows, COLUMNS)
    assert (mc.arm, mc.beta, mc.replicate, mc.seed) == ("mc", 0.1, "3", 3)
    assert mc.final == {"reward": 1.5, "kl": 2.0}
    assert rb.final is None


def test_the_last_step_with_both_metrics_is_the_result(write):
    lines = [
        {"step": 1, "data": {"critic/score/mean": 0.5, "actor/kl": 0.1}},
        {"step": 3, "data": {"critic/score/mean": 0.9, "actor/kl": 0.3}},
        {"step": 2, "data": {"critic/score/mean": 0.7, "actor/kl": 0.2}},
        {"step": 4, "data": {"critic/score/mean": 1.1}},
        {"step": 4, "data": {"timing_s/step": 9.0}},
    ]
    path = write("\n".join(map(json.dumps, lines)), "verl.jsonl")
    columns = {"reward": "data.critic/score/mean", "kl": "data.actor/kl", "step": "step"}
    (run,) = collect(read_rows(path), columns, {"arm": "grpo", "beta": 0.05, "replicate": "a"})
    assert run.final == {"reward": 0.9, "kl": 0.3}
    assert sorted(run.curves["reward"]) == [1, 2, 3, 4]
    assert run.seed == collect(read_rows(path), columns, {"arm": "b", "beta": 1, "replicate": "a"})[0].seed


def test_metrics_that_share_no_step_are_refused_with_their_steps(write):
    """wandb#6005: exports have rewards and KLs in rows of their own."""
    path = write('{"log_history": [{"step": 10, "reward": 1}, {"step": 11, "kl": 1}]}', "t.json")
    columns = {"reward": "reward", "kl": "kl", "step": "step"}
    (run,) = collect(read_rows(path), columns, {"arm": "a", "beta": 1, "replicate": "0"})
    with pytest.raises(ConfigurationError, match="its steps: reward at 10; kl at 11; write the step of one"):
        _ = run.final


def test_a_curve_that_ends_in_nan_has_no_final_values(write):
    path = write('{"log_history": [{"step": 1, "reward": 1, "kl": 1}, {"step": 2, "reward": NaN}]}', "t.json")
    columns = {"reward": "reward", "kl": "kl", "step": "step"}
    (run,) = collect(read_rows(path), columns, {"arm": "a", "beta": 1, "replicate": 0})
    assert run.final is None
    assert math.isnan(run.curves["reward"][2])


HEAD = "method,beta,seed,reward,kl\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "mc,0.1,0,1,1\nmc,0.1,0,2,1\n", r"line 3: another reward of mc, .*line 2; name a col"),
        (HEAD + "mc,0.1,0,high,1\n", r"line 2: reward is 'high'; a number"),
        (HEAD + "mc,0.1,0,,1\nmc,0.1,1,1,1\n", r"line 2: has no reward; a number is expected"),
        (HEAD + "mc,,0,1,1\nmc,1,0,1,1\n", r"line 2: beta is unknown"),
        (HEAD + "mc,0.1,0,1\n", r"line 2: has 4 fields, the header 5"),
        (HEAD.replace("kl", "KL") + "mc,0.1,0,1,1\n", r"columns.kl: 'kl' is in no row of .*; it has .*KL"),
        ("kl,kl\n1,2\n", r"has the column 'kl' more than once"),
        (HEAD, r"has no rows"),
        (HEAD + '"mc,0.1,0,1,1\n', r"line 2: unexpected end of data"),
    ],
)
def test_invalid_csv_files_are_refused(write, text, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        collect(read_rows(write(text)), COLUMNS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": ', r"a.jsonl: line 2: is not JSON"),
        ("a.json", "[", r"is not JSON"),
        ("a.txt", "", r"a.txt: .txt is not allowed"),
        ("a.csv", "caf\udce9", r"byte 3 is not UTF-8"),
    ],
)
def test_files_whose_content_contradicts_their_suffix_are_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError, match=message):
        read_rows(path)


def test_two_rows_of_one_step_must_agree(write):
    columns = COLUMNS | {"step": "step"}
    head = "method,beta,seed,step,reward,kl\n"
    same = collect(read_rows(write(head + "mc,1,0,5,1,1\nmc,1,0,5,1,1\n")), columns)
    assert same[0].final == {"reward": 1.0, "kl": 1.0}
    with pytest.raises(ConfigurationError, match="line 3: another kl of mc, beta 1, replicate 0"):
        collect(read_rows(write(head + "mc,1,0,5,1,1\nmc,1,0,5,1,2\n")), columns)
    with pytest.raises(ConfigurationError, match=r"line 2: step is '1.5'; an integer"):
        collect(read_rows(write(head + "mc,1,0,1.5,1,1\n")), columns)
