"""Every mistake of a user ends in one clear line and exit code 2: no traceback, no hang, nothing lost.

The default run tries those that are marked as quick; `make mistakes` all.
"""

import pytest
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
