"""Every mistake of a user ends in one clear line and exit code 2: no traceback, no hang, nothing lost.

The default run tries those that are marked as quick; `make mistakes` tries all.
"""

from collections import Counter

import pytest
from mistakes.driver import RIGHT, summary
from mistakes.tables import TABLES, Desk, make_files

QUICK = [
    pytest.param(mistake, id=f"{name}-{mistake}")
    for name, table in TABLES.items()
    for mistake in table()
    if mistake.quick
]


@pytest.fixture(scope="module")
def desk(chain, tmp_path_factory):
    files = tmp_path_factory.mktemp("mistakes") / "files"
    make_files(files, chain.root)
    return Desk(files, chain.commands, lambda: tmp_path_factory.mktemp("case"))


def test_each_mistake_has_a_name_of_its_own():
    """Of two with one name, `make mistakes` would try the first."""
    for table in TABLES.values():
        names = Counter(map(str, table()))
        assert not {name for name, count in names.items() if count > 1}


@pytest.fixture(scope="module")
def tally(request):
    counts = Counter()
    yield counts
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line(summary(counts))


@pytest.mark.parametrize("mistake", QUICK)
def test_a_mistake(desk, tally, mistake):
    verdict, output, _ = desk.judge(mistake)
    tally[verdict] += 1
    assert verdict in RIGHT, f"{verdict.value}; expected {mistake.line}; got:\n{output}"


def test_a_sample_of_strangers_files(desk, tally):
    """`make mistakes` tries a thousand; one in eighty of them is tried here, of every kind."""
    every = desk.strangers(count=40)
    assert len({str(mistake) for mistake in every}) == len(every) > 1000
    for mistake in every[::80]:
        verdict, output, _ = desk.judge(mistake)
        tally[verdict] += 1
        assert verdict in RIGHT, f"{mistake}: {verdict.value}; got:\n{output}"
