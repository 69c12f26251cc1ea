"""Plans, runs and reads seed sweeps; never imports torch or lightning."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.results.frames import Frames


def frames(directory: str | Path) -> "Frames":
    """A sweep as pandas data frames.

    Args:
        directory: The sweep's directory, such as runs/demo; an imported one will do.

    Returns:
        `runs`, a row per cell with its final metrics, and `curves`, a row per logged value.

    Raises:
        ConfigurationError: If there is no result to read.
    """
    from analysis.results.frames import read_frames  # commands do not wait for it

    return read_frames(directory)
