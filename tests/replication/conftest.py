import sys
from pathlib import Path

import matplotlib
import pytest

ANALYSIS = Path(__file__).parents[1] / "analysis"
sys.path[:0] = [str(Path(__file__).parent / "claims"), str(ANALYSIS), str(ANALYSIS / "report")]

from reading import sweep_with as sweep_with, undrawn as undrawn  # noqa: E402


@pytest.fixture
def pinned_matplotlib():
    """The version that has drawn the committed figures, as others place their labels elsewhere."""
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text().split()
    if f"matplotlib=={matplotlib.__version__}" not in pinned:
        pytest.skip(f"matplotlib {matplotlib.__version__} is not the pinned one")
