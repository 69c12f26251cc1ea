"""What the README says can be done."""

import doctest
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = sorted(
    {line.partition("#")[0].strip() for line in re.findall(r"^python -m .*$", README, re.MULTILINE)}
)


def test_the_python_examples_run():
    examples = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    found = doctest.DocTestParser().get_doctest(examples, {}, "README.md", "README.md", 0)
    runner = doctest.DocTestRunner()
    assert runner.run(found).failed == 0
    assert runner.tries > 5


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_name_what_is_there(command):
    _, _, module, *arguments = command.split()
    assert module in ("lit_klrb", "analysis")
    for option, value in pairwise(arguments):
        if option == "--config":
            assert (ROOT / value).exists()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README))
def test_its_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_it_starts_with_what_it_is_the_two_commands_and_a_picture():
    screen = "\n".join(README.splitlines()[:20])
    assert "make demo" in screen
    assert "python -m lit_klrb fit --config configs/demo/rloo.yaml" in screen
    assert "![" in screen
