"""What commands print on a terminal and to a pipe."""

import re
import sys

import pytest

from lit_klrb.cli.main import main
from lit_klrb.terminal import print_lines, print_table

NAMES = ("RaoBlackwellControlVariate", "MonteCarlo")
ROWS = [(name, "0.25", "-1", "a sentence of some words") for name in NAMES]


@pytest.mark.parametrize("width", [80, 60])
def test_a_table_wraps_at_spaces_and_keeps_words_whole(capsys, monkeypatch, width):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(("name", "a number", "n", "text"), ROWS)
    lines = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    ends = [re.match(r"(\S+) +0\.25 +-1  ", line).end() for line in lines if line.startswith(NAMES)]
    assert len(ends) == 2
    assert len({*ends}) == 1
    assert (len(lines) == 4) == (width == 80)


def test_sentences_wrap_at_words_on_a_terminal_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = "  cosines down to 0.999 at 0.01, 0.694 at 0.3 nats\nshort"
    print_lines(text)
    assert capsys.readouterr().out == f"{text}\n"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(stream := getattr(sys, name), "isatty", lambda: True)
        print_lines(text, stream=stream)
    assert {*capsys.readouterr()} == {"  cosines down to 0.999 at\n    0.01, 0.694 at 0.3 nats\nshort\n"}


def test_a_pipe_gets_one_line_per_row_whatever_a_cell_holds(capsys):
    print_table(("a", "b"), [("one\ttwo\n", "\x1b[2J")])
    assert capsys.readouterr().out == "a\tb\none\\ttwo\\n\t\\x1b[2J\n"


@pytest.mark.parametrize(("terminal", "said"), [(True, "loading torch ...\n"), (False, "")])
def test_a_terminal_is_told_what_takes_seconds(capsys, monkeypatch, terminal, said):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["explain", "--json"]) == 0
    assert capsys.readouterr().err == said
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert capsys.readouterr().err == ""
