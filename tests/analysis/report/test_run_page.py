"""The page of a single run: its numbers are those of the run's files."""

import re

import pytest

from analysis.cli.main import main


def test_the_page_shows_the_evaluations_and_the_texts(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    for folder in ("metrics/attempt_0", "completions"):
        (tmp_path / folder).mkdir(parents=True)
    rows = "step,val/kl,val/kl_se,val/length,train/kl\n0,7.25,0.5,24,\n1,,,,6\n2,1.5,,8.5,\n"
    (tmp_path / "metrics/attempt_0/metrics.csv").write_text(rows)
    config = 'data: {init_args: {teacher_system_prompt: Be <i>, teacher_examples: [["Q?", "A!"]]}}'
    (tmp_path / "config.yaml").write_text(config)
    table = "text_at_start,reward_at_start,text,reward\n"
    (tmp_path / "completions/step_000002.csv").write_text(table + '"Why?\nThe <b>.",0,"Why?\nArrr!",0\n')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    page = (tmp_path / "report.html").read_text("utf-8")
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    expected = [
        ["0", "7.25", "0.980", "24.00"],
        ["2", "1.50", "–", "8.50"],
        ["Why?", "The &lt;b&gt;.", "Arrr!"],
        ["teacher system prompt", "Be &lt;i&gt;"],
        ["teacher examples", "Q? A!"],
        ["command", f"python -m lit_klrb fit --config {tmp_path / 'config.yaml'}"],
    ]
    for row in expected:
        assert any(cells[place : place + len(row)] == row for place in range(len(cells))), row


def test_reward_and_j_come_before_the_kl_and_what_trains_nothing_is_counted(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics/attempt_0").mkdir(parents=True)
    rows = (
        "step,val/kl,val/reward,train/equal_rewards,train/unfinished,train/left_out\n"
        "0,0,1.5,,,7\n1,,,0.25,1,\n2,4,3.5,0.75,,\n"
    )
    (tmp_path / "metrics/attempt_0/metrics.csv").write_text(rows)
    (tmp_path / "config.yaml").write_text("kl: {beta: 0.25}\ndata: {init_args: {}}")
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<h1>Reward 1.50 before, 3.50 after</h1>" in page
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    assert cells[:4] == ["step", "reward", "J = reward − β·KL", "KL, nats per completion"]
    assert cells[4:12] == ["0", "1.50", "1.50", "0.00", "2", "3.50", "2.50", "4.00"]
    assert "50% of the prompts had completions of equal reward" in page
    assert "100% of the completions were cut" in page
    assert "7 rows of the data left out" in page


def test_a_run_without_evaluations_is_refused(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("has no evaluation of completions yet; run fit first\n")


@pytest.mark.parametrize("content", ["data: !!python/object:os.system {}", "data: [", "[1]", "data: {}"])
def test_a_damaged_configuration_is_one_line(tmp_path, capsys, content):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics/attempt_0").mkdir(parents=True)
    (tmp_path / "metrics/attempt_0/metrics.csv").write_text("step,val/kl\n0,7.25\n")
    (tmp_path / "config.yaml").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "config.yaml" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics/attempt_0/metrics.csv", b"step,val/kl\n0,1.5.5\n"),
        ("metrics/attempt_0/metrics.csv", b"step,val/kl\n0,1,2\n"),
        ("metrics/attempt_0/metrics.csv", b"step,val/kl\n0,1\xf2\n"),
        ("completions/step_000002.csv", b"text_at_start,text\nWhy?\n"),
        ("completions/step_000002.csv", b"something\nelse\n"),
    ],
)
def test_a_damaged_table_is_one_line(tmp_path, capsys, name, content):
    (tmp_path / "run.json").write_text("{}")
    for path, rows in (("metrics/attempt_0/metrics.csv", b"step,val/kl\n0,1\n"), (name, content)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(rows)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / name} is damaged: ")
    assert error.count("\n") == 1
