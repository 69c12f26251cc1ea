"""The commands and examples of the README and the documentation."""

import doctest
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from lit_klrb.cli.main import COMMANDS as OURS, SWEEPS, main
from replication.__main__ import main as replication

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in PAGES}
CONFIGS = [path for folder in ("configs", "replication") for path in (ROOT / folder).rglob("*.yaml")]
COMMANDS = sorted(
    {
        line.partition("#")[0].strip(" \\")
        for page in [*PAGES, *CONFIGS]
        for line in re.findall(
            r"^(?:#   (?:LIT\S+ )?)?((?:lit-klrb|python -m (?:benchmarks|replication)) .*)",
            page.read_text("utf-8"),
            re.M,
        )
    }
)
# With their continuation lines, without those that import a module of the reader's
FITS = sorted(
    {
        command
        for text in TEXTS.values()
        for command in re.findall(r"^lit-klrb fit (?:.*\\\n)*.*$", text, re.MULTILINE)
        if not re.search(r"my_\w+[.:]", command)
    }
)
LINKS = [
    (page, link) for page, text in TEXTS.items() for link in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)
]
EXAMPLES = {
    page: "\n".join(blocks)
    for page, text in TEXTS.items()
    if (blocks := re.findall(r"```python\n(>>>.*?)```", text, re.DOTALL))
}


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_python_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestParser().get_doctest(EXAMPLES[page], {}, page, page, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert runner.run(found).failed == 0
    assert runner.tries > 5


def test_the_commands_name_what_is_there():
    """On the pages and in the comments of configurations."""
    assert len(COMMANDS) > 150
    words = {(*command.removeprefix("python -m ").split()[:2],) for command in COMMANDS}
    for program, name in words:
        if program == "replication" or name in SWEEPS:
            with pytest.raises(SystemExit, match=r"^0$"):
                (replication if program == "replication" else main)([name, "--help"])
        else:
            assert program == "benchmarks" or name in (*OURS, "count"), name
    for command in COMMANDS:
        for option, value in pairwise(command.split()):
            users = value.startswith(("my_", "RLOO"))  # a file of the reader's
            assert option != "--config" or users or (ROOT / value).exists(), command


def test_the_options_of_fit_are_what_it_takes(capsys):
    assert len(FITS) >= 14
    wrong = {}
    for command in FITS:
        words = shlex.split(command.replace("\\\n", ""), comments=True)[1:]
        try:
            main([*words, "--print_config"])
        except SystemExit as ended:
            if ended.code:
                wrong[command] = capsys.readouterr().err
        else:
            wrong[command] = capsys.readouterr().err
    assert wrong == {}


def test_the_line_for_shells_completes_every_command():
    line = re.search(r'^complete .* -W "([^"]+)" lit-klrb$', TEXTS["docs/commands.md"], re.MULTILINE)
    assert line[1].replace("\\\n", "").split() == [*OURS, *SWEEPS]


def test_links_lead_somewhere():
    assert len(LINKS) > 50
    assert [(page, link) for page, link in LINKS if not ((ROOT / page).parent / link).exists()] == []


def test_the_readme_says_what_it_is_then_how_to_install_and_try_it_and_has_a_picture():
    text = TEXTS["README.md"]
    places = [text.index(part) for part in ("## Install", "## Try it", "make demo", "![", "loss.backward()")]
    assert places == sorted(places)
    assert "%" not in text[: text.index("## Install")]


def test_the_readme_is_a_page_and_not_a_book_and_its_code_is_not_cut():
    assert len(TEXTS["README.md"].splitlines()) <= 90
    code = re.findall(r"```(?:sh|python)\n(.*?)```", TEXTS["README.md"], re.DOTALL)
    assert [line for line in "\n".join(code).splitlines() if len(line) > 76] == []
