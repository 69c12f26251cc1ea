"""Every mistake of a user ends in one clear line and exit code 2: no traceback, no hang, nothing lost.

The default run tries those that are marked as quick, and a sample of strangers' files; `make mistakes` all.
"""

import pytest
from mistakes.strangers import strangers
from mistakes.tables import Desk, mistakes


@pytest.fixture(scope="module")
def desk(chain, tmp_path_factory):
    files = tmp_path_factory.mktemp("mistakes")
    return Desk(files, chain.commands, lambda: tmp_path_factory.mktemp("case"))


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, id=str(m), marks=[] if m.quick else [pytest.mark.slow]) for m in mistakes()]
)
def test_a_mistake(desk, mistake):
    wrong = desk.complaint(mistake)
    assert not wrong, wrong


@pytest.mark.parametrize("every", [80, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_files_of_strangers(desk, chain, every):
    """Nine hundred in all, of every kind; one in eighty of them by default."""
    made = strangers(desk.files, chain.root)
    assert len({str(mistake) for mistake in made}) == len(made) > 800
    for mistake in made[::every]:
        wrong = desk.complaint(mistake)
        assert not wrong, f"{mistake}: {wrong}"
