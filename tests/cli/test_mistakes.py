"""Every mistake of a user ends in one clear line and exit code 2: no traceback, no hang, nothing lost."""

import re
from collections import Counter
from pathlib import Path

import pytest
from mistakes.code import wrong_code
from mistakes.driver import RIGHT, judge, summary
from mistakes.files import (
    make_files,
    wrong_checkpoints,
    wrong_configs,
    wrong_data,
    wrong_models,
    wrong_places,
)
from mistakes.settings import combinations, commands, out_of_range, wrong_types

from lit_klrb.cli.main import main

MISTAKES = Path(__file__).parents[1] / "mistakes"
TABLES = (
    *(wrong_types, out_of_range, combinations, commands),
    *(wrong_data, wrong_configs, wrong_checkpoints, wrong_models, wrong_places, wrong_code),
)
SLOW = pytest.mark.slow
CASES = [
    pytest.param(mistake, marks=() if mistake.quick else SLOW, id=f"{table.__name__}-{mistake}")
    for table in TABLES
    for mistake in table()
]


@pytest.fixture(scope="session")
def files(chain, tmp_path_factory):
    root = tmp_path_factory.mktemp("mistakes") / "files"
    make_files(root, chain.root)
    return root


@pytest.fixture(scope="module")
def tally(request):
    counts = Counter()
    yield counts
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line(summary(counts))


@pytest.mark.parametrize("mistake", CASES)
def test_a_mistake(chain, files, tally, tmp_path, monkeypatch, record_property, mistake):
    monkeypatch.syspath_prepend(files)
    monkeypatch.syspath_prepend(MISTAKES)
    monkeypatch.chdir(tmp_path)
    places = {"FILES": files, "CHAIN": chain.root, "RUN": tmp_path / "run"}

    def placed(text, quote=str):
        return re.sub(r"\b(FILES|CHAIN|RUN)\b", lambda name: quote(str(places[name[1]])), text)

    argv = [placed(argument) for argument in mistake.argv]
    if mistake.stage is not None:
        argv = chain.commands.argv(mistake.command, mistake.stage, *argv, run=tmp_path / "run")
    line = mistake.line and placed(mistake.line, re.escape)
    verdict, output = judge(mistake._replace(line=line), lambda: main(argv))
    tally[verdict] += 1
    record_property("verdict", verdict.name)
    record_property("output", output)
    assert verdict in RIGHT, f"{verdict.value}; expected {line}; got:\n{output}"
