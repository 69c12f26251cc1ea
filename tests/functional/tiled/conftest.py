"""Settings of all tests of the tiled operations."""

import pytest

from lit_klrb.functional.tiled import head


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks, and a shorter one at the end, for the vocabularies of these tests."""
    monkeypatch.setattr(head, "_CPU_BLOCK", 7)
