import sys
from pathlib import Path

ANALYSIS = Path(__file__).parents[1] / "analysis"
sys.path[:0] = [str(Path(__file__).parent / "claims"), str(ANALYSIS), str(ANALYSIS / "report")]

from reading import undrawn as undrawn  # noqa: E402
