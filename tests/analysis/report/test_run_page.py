"""The page of a single run: its numbers are those of the run's files."""

import html
import re
from urllib.parse import unquote

import pytest
import yaml

from analysis.cli.main import main

METRICS, CONFIG, TEXTS = "metrics/attempt_0/metrics.csv", "config.yaml", "completions/step_000002.csv"
ONE = b"step,val/kl\n0,7.25\n"


def write_run(run, files):
    """A run with these files."""
    for name, content in {"run.json": "{}", **files}.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content.encode() if isinstance(content, str) else content)


def test_the_page_shows_the_evaluations_and_the_texts(tmp_path, capsys):
    files = {
        METRICS: "step,val/kl,val/kl_se,val/length,train/kl,train/logged/kl\n"
        "0,7.25,0.5,24,,\n1,,,,6,9\n2,1.5,,8.5,5,11\n3,,,,5,7\n",
        CONFIG: "model: {class_path: lit_klrb.modules.DistillModule}\ntrainer: {max_steps: 3}\n"
        'data: {init_args: {teacher_system_prompt: Be <i>, teacher_examples: [["Q?", "A!"]]}}',
        TEXTS: 'text_at_start,reward_at_start,text,reward\n"Why?\nThe <b>.",0,"Why?\nArrr!",0\n',
    }
    write_run(tmp_path, files)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    page = (tmp_path / "report.html").read_text("utf-8")
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    expected = [
        ["0", "7.25", "0.980", "24.00"],
        ["2", "1.50", "–", "8.50"],
        ["Why?", "The &lt;b&gt;.", "Arrr!"],
        ["kl", "9.00", "7.00", "9.00"],
        ["module", "DistillModule"],
        ["steps", "3"],
        ["teacher system prompt", "Be &lt;i&gt;"],
        ["teacher examples", "Q? A!"],
        ["command", f"lit-klrb fit --config {tmp_path / 'config.yaml'}"],
    ]
    for row in expected:
        assert any(cells[place : place + len(row)] == row for place in range(len(cells))), row


def test_a_strangers_configuration_is_shown_as_it_stands(tmp_path, monkeypatch):
    """Nothing of the reader's environment comes into a page that may be sent on."""
    monkeypatch.setenv("READERS_KEY", "f00dfeed")
    text = "${oc.env:READERS_KEY} ${oc.decode:${oc.env:READERS_KEY}} ${kl.beta} ${"
    config = {"kl": {"beta": 0.5}, "data": {"init_args": {"system_prompt": text}}}
    write_run(tmp_path, {METRICS: ONE, CONFIG: yaml.safe_dump(config)})
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert text in page
    assert "f00dfeed" not in page


def test_reward_and_j_come_before_the_kl_and_what_trains_nothing_is_counted(tmp_path):
    rows = (
        "step,val/kl,val/reward,val/reward_se,train/equal_rewards,train/unfinished,train/left_out\n"
        "0,0,1.5,0.25,,,7\n1,,,,0.25,1,\n2,4,3.5,1,0.75,,\n"
    )
    write_run(tmp_path, {METRICS: rows, CONFIG: "kl: {beta: 0.25}\ndata: {init_args: {}}"})
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<h1>Reward 1.50 before, 3.50 after</h1>" in page
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    assert "over prompts: 1.01 to 1.99 before, 1.54 to 5.46 after." in page
    assert cells[:5] == ["step", "reward", "± 95 %", "J = reward − β·KL", "KL, nats per completion"]
    assert cells[5:15] == ["0", "1.50", "0.49", "1.50", "0.00", "2", "3.50", "1.96", "2.50", "4.00"]
    assert "50% of the prompts had completions of equal reward" in page
    assert "100% of the completions were cut" in page
    assert "7 rows of the data left out" in page


@pytest.mark.parametrize("path", ["null", "package.module:score"])
def test_rewards_of_zero_are_shown_only_if_the_run_has_a_reward(tmp_path, path):
    rows = "step,val/kl,val/reward\n0,9,0\n2,4,0\n"
    config = f"model: {{init_args: {{reward_path: {path}}}}}\nkl: {{beta: 1}}\ndata: {{init_args: {{}}}}"
    write_run(tmp_path, {METRICS: rows, CONFIG: config})
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    title = "KL 9.00 before, 4.00 after" if path == "null" else "Reward 0 before, 0 after"
    assert f"<h1>{title}</h1>" in page
    assert (">reward</th>" in page) == (path != "null")


def test_steps_of_training_have_a_figure_which_says_what_is_left_out(tmp_path):
    lines = [f"{step},,{step / 8},{step * 2}" for step in range(401)]
    write_run(tmp_path, {METRICS: "\n".join(["step,val/kl,train/kl,train/grad_norm", "0,1,,", *lines, ""])})
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "Training, step by step" in page
    assert "Of 401 steps one in 3 is drawn" in page
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    start = cells.index("norm of the gradient") + 1
    assert cells[start : start + 6] == ["0", "0.00", "0.0", "3", "0.38", "6.0"]


def test_panels_stand_two_across_and_show_estimates_below_zero(tmp_path):
    rows = "step,val/kl,train/kl,train/length,train/grad_norm\n0,1,,,\n0,,-2,9,1\n1,,1,9,1\n2,,1,9,1\n"
    write_run(tmp_path, {METRICS: rows})
    assert main(["report", str(tmp_path)]) == 0
    page = unquote(html.unescape((tmp_path / "report.html").read_text("utf-8")))
    figure = page[page.index("step by step</h3>") :]
    texts = re.findall(r'<text[^>]* x="([\d.]+)"[^>]*>([^<]*)<', figure)
    left, right, below = (float(place) for place, text in texts if text == "step")
    assert left == below < right
    names = {text for _, text in texts}
    assert "−2" in names
    assert "1.0" not in names  # of axes without a metric


def test_two_steps_have_no_figure(tmp_path):
    write_run(tmp_path, {METRICS: "step,val/kl,train/kl\n0,1,\n0,,2\n1,,3\n"})
    assert main(["report", str(tmp_path)]) == 0
    assert "step by step" not in (tmp_path / "report.html").read_text("utf-8")


def test_a_run_without_evaluations_is_refused(tmp_path, capsys):
    write_run(tmp_path, {})
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("has no evaluation of completions yet; run fit first\n")


@pytest.mark.parametrize(
    ("name", "content", "damage"),
    [
        *(
            (CONFIG, text, "")
            for text in ("data: !!python/object:os.system {}", "data: [", "[1]", "data: {}")
        ),
        *((METRICS, ONE + row, " is damaged: ") for row in (b"1,1.5.5\n", b"1,1,2\n", b"1,1\xf2\n")),
        ("metrics/notes.csv", ONE, ": must have the number of its attempt"),
        *((TEXTS, text, " is damaged: ") for text in ("text_at_start,text\nWhy?\n", "something\nelse\n")),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, capsys, name, content, damage):
    write_run(tmp_path, {METRICS: ONE, name: content})
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / name}{damage}")
    assert error.count("\n") == 1
